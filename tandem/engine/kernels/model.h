/* What a pass knows of a model and of its step. structs.py has the same structs. */

#pragma once
#include "packing.h"

/* A layer's experts. The router's outputs, filled up to a multiple of 32, are their scores and, where the shared expert
   has a gate, the gate's. Biases are of all experts, one after the other. */
struct experts {
    struct weight router;
    const struct weight *gate_up, *down; /* of each */
    const bf16 *router_bias, *gate_up_bias, *down_bias;
};

/* What the experts of all layers have in common, and room for a step's. */
struct mixture {
    int64_t count, per_token, inner;
    int64_t is_of_chosen; /* shares are a softmax of the chosen experts' scores, not of all */
    int64_t has_shared_gate;
    float *scores, *shares; /* (rows, router's outputs), (rows, per_token) */
    int32_t *chosen, *groups;
    bf16 *sorted; /* (rows * per_token, hidden) */
    float scale; /* of shares */
};

/* With experts, gate_up and down are the shared expert's, if there is one. */
struct layer {
    struct weight qkv, o, gate_up, down;
    const struct experts *experts;
    const bf16 *norms[4]; /* before and after attention, before and after the MLP; null: there is none */
    const bf16 *qkv_bias, *q_norm, *k_norm, *o_bias, *gate_up_bias, *down_bias;
    const bf16 *sinks; /* scores, of each head, of a key that has no value; or null */
    int64_t angles; /* which of the model's; -1: nothing is rotated */
    int64_t window; /* how many tokens a token sees, itself included; 0: all before it */
    char *kv; /* (blocks, 2, kv_heads, block_size, row): see kv_row */
};

/* The columns of rows of `of` numbers that this rank computes: as many as its weights have outputs, from `first` on;
   zeros: there is one rank. */
struct columns { int64_t first, of; };

/* The ranks that share the layers, of which each computes its columns; parallel/exchange.c has their meetings. */
struct ranks {
    void *meetings;
    void (*arrive)(void *meetings);
    int64_t (*wait)(void *meetings, uint32_t met); /* until all have arrived so often; not 0: in vain */
    uint32_t *met;                                 /* how often before this pass */
};

struct model {
    const struct layer *layers;
    struct weight head;
    const bf16 *norm;
    uint32_t *opened; /* for each of MAX_THREADS threads, pairs of the widest panel: opened_size */
    int64_t opened_size;
    float *x_sums;
    const struct mixture *mixture;
    const float *inverse; /* radians per position, (angles, rotated / 2) */
    int64_t angles;       /* how many kinds: 1, or 2 if some layers have their own */
    int64_t rotated;      /* how many of a head's numbers are rotated */
    int64_t interleaved;  /* pairs that are rotated lie side by side, else in two halves */
    int64_t norms_all;    /* q and k are normed over all heads together */
    int64_t hidden, heads, kv_heads, head_dim, intermediate, block_size; /* heads and inner outputs: a rank's own */
    int64_t block_stride, value_stride; /* bytes from a block to the next, and from its keys to its values */
    int64_t kv_int8; /* KV is in int8, as kv_cache.py has it */
    int64_t activation; /* SILU or what follows it */
    float eps;
    float weights_from;      /* what is added to the weights of norms: 0 or 1 */
    float residual_scale;    /* the factor of what is added to x */
    float attention_scale;   /* the factor of scores */
    float attention_softcap; /* scores stay below; 0: there is no bound */
    float factors[2];        /* of each kind's cosines and sines */
    const struct ranks *ranks; /* null: there is one */
    struct columns attended, outputs, inner, vocabulary;
};

/* A part of a linear layer's outputs: down (rank, inputs), up (rank, outputs); rank 0 adds nothing. */
struct lora_part { const bf16 *down, *up; int64_t rank, outputs; };

/* One step. `x` (rows, hidden) holds embeddings before and hidden states after; the others are room for the pass.
   Sequence s has rows starts[s] ... starts[s + 1], the last of its lengths[s] tokens, whose KV lies in the blocks
   tables[table_starts[s]] ... tables[table_starts[s + 1]]. Where any row is adapted, `adapters` has each one's table, PARTS
   for each layer, or null, and `added` is room for what they add. Ranks share x (or `plain`, where norms follow linear
   layers), `attended` and `inner`. */
struct step {
    bf16 *x, *normed, *qkv, *attended, *inner;
    bf16 *plain;   /* linear layers' outputs before the norm that follows them: `normed` of one rank */
    bf16 *ordered; /* `attended` or `inner` in the order of a weight's inputs; null: there, in place */
    float *cos, *sin; /* (kinds of angles, rows, rotated / 2): room, too */
    const int64_t *positions, *slots, *starts, *lengths, *table_starts;
    const int32_t *tables;
    const int64_t *near_slots; /* slots and tables of layers with a window; blocks that no row sees are never read */
    const int32_t *near_tables;
    const struct lora_part *const *adapters;
    float *added;
    int64_t rows, seqs;
};
