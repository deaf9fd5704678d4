/* A mixture of experts in the place of a layer's gate-up and down: a router chooses a few of many for each row.

     route     scores of all experts ─> each row's experts, the best first, and their shares
     group     pairs of a row and its expert, sorted by expert: the pairs of each chosen expert are a slot
     gather    the pairs' rows of x
     experts   gate-up and down, all slots' panels in one loop: a step reads the weights of each chosen expert once
     combine   x + its experts' outputs by their shares, in the order of choice (+ what the shared expert computes)

   Loops have as many pieces whatever is chosen, and a late thread, which may find groups of which the next layer's have
   replaced some, finds only places in the rooms. */

#pragma once
#include "linear.h"

enum { MOST_EXPERTS = 4096 };

static inline int64_t num_slots(const struct mixture *x, int64_t rows) {
    return rows * x->per_token < x->count ? rows * x->per_token : x->count;
}

/* experts, starts: of each slot (starts: and the end); places: where each pair has come; pairs: which a place has. */
struct groups { int32_t *experts, *starts, *places, *pairs; };

static inline int64_t groups_bytes(const struct mixture *x, int64_t rows) {
    return (2 * num_slots(x, rows) + 1 + 2 * rows * x->per_token) * (int64_t)sizeof(int32_t);
}

static inline struct groups groups_at(const struct mixture *x, int32_t *from, int64_t rows) {
    int32_t *starts = from + num_slots(x, rows), *places = starts + num_slots(x, rows) + 1;
    return (struct groups){from, starts, places, places + rows * x->per_token};
}

static void choose_row(const struct mixture *x, const float *scores, int32_t *chosen, float *shares) {
    uint8_t taken[MOST_EXPERTS] = {0};
    float total = 0;
    for (int64_t n = 0; n < x->per_token; n++) {
        int32_t best = -1;
        for (int32_t i = 0; i < x->count; i++)
            if (!taken[i] && (best < 0 || scores[i] > scores[best])) best = i;
        taken[best] = 1, chosen[n] = best, shares[n] = expf(scores[best] - scores[chosen[0]]);
    }
    for (int64_t i = 0; i < (x->is_of_chosen ? x->per_token : x->count); i++)
        total += x->is_of_chosen ? shares[i] : expf(scores[i] - scores[chosen[0]]);
    for (int64_t n = 0; n < x->per_token; n++) shares[n] = shares[n] / total * x->scale;
}

static void route(struct thread *thread, const struct mixture *x, const struct experts *e, const struct step *s) {
    linear(thread, (struct linear){.x = s->normed, .weight = &e->router, .bias = e->router_bias, .out = x->scores,
                                   .rows = s->rows, .kind = WIDE});
    begin(thread, s->rows);
    int32_t *chosen = thread->result;
    float *shares = (float *)(chosen + x->per_token);
    for (int64_t next, row; (row = take(thread, &next)) >= 0;) {
        choose_row(x, x->scores + row * e->router.outputs, chosen, shares);
        if (!win(thread, row)) continue;
        memcpy(x->chosen + row * x->per_token, chosen, x->per_token * sizeof *chosen);
        memcpy(x->shares + row * x->per_token, shares, x->per_token * sizeof *shares);
        written(thread);
    }
}

static void group_pairs(const struct mixture *x, int64_t rows, struct groups g) {
    int32_t at[MOST_EXPERTS] = {0}, slot = 0, start = 0;
    memcpy(g.places, x->chosen, rows * x->per_token * sizeof *g.places);
    for (int64_t pair = 0; pair < rows * x->per_token; pair++) at[g.places[pair]]++;
    for (int32_t expert = 0; expert < x->count; expert++) {
        if (!at[expert]) continue;
        g.experts[slot] = expert, g.starts[slot++] = start;
        start += at[expert], at[expert] = start - at[expert];
    }
    for (; slot < num_slots(x, rows); slot++) g.experts[slot] = 0, g.starts[slot] = start;
    g.starts[slot] = start;
    for (int32_t pair = 0; pair < rows * x->per_token; pair++) {
        const int32_t place = at[g.places[pair]]++;
        g.places[pair] = place, g.pairs[place] = pair;
    }
}

static void group(struct thread *thread, const struct mixture *x, int64_t rows) {
    begin(thread, 1);
    for (int64_t next, piece; (piece = take(thread, &next)) >= 0;) {
        group_pairs(x, rows, groups_at(x, thread->result, rows));
        if (win(thread, piece)) memcpy(x->groups, thread->result, groups_bytes(x, rows)), written(thread);
    }
}

static void gather(struct thread *thread, const struct mixture *x, const struct step *s, int64_t hidden) {
    const struct groups g = groups_at(x, x->groups, s->rows);
    begin(thread, s->rows * x->per_token);
    for (int64_t next, place; (place = take(thread, &next)) >= 0;) {
        if (!win(thread, place)) continue; /* nobody else may compute it, so what it is made of stays */
        memcpy(x->sorted + place * hidden, s->normed + g.pairs[place] / x->per_token * hidden,
               hidden * sizeof *x->sorted);
        written(thread);
    }
}

/* Puts each pair's row, in place, into the order of its expert's inputs. */
static void reorder_pairs(struct thread *thread, const struct mixture *x, const struct weight *weights, bf16 *rows,
                          int64_t count) {
    const struct groups g = groups_at(x, x->groups, count / x->per_token);
    const int64_t inputs = weights->inputs;
    bf16 *room = (bf16 *)thread->opened;
    begin(thread, count);
    for (int64_t next, place; (place = take(thread, &next)) >= 0;) {
        bf16 *row = rows + place * inputs;
        const int32_t *order = weights[x->chosen[g.pairs[place]]].order;
        for (int64_t i = 0; i < inputs; i++) room[i] = row[order[i]];
        if (win(thread, place)) memcpy(row, room, inputs * sizeof *room), written(thread);
    }
}

/* Slot `slot` of `all`, which are the pairs of `rows` rows. */
static inline struct linear slot_of(const struct mixture *x, const struct weight *weights, const struct linear *all,
                                    int64_t rows, int64_t slot) {
    const struct groups g = groups_at(x, x->groups, rows);
    const int64_t first = g.starts[slot], count = g.starts[slot + 1] - first;
    struct linear part = *all;
    part.weight = weights + g.experts[slot], part.first = first;
    part.rows = count < 0 ? 0 : count < rows ? count : rows;
    part.x += first * weights->inputs;
    part.out = (char *)all->out + first * (weights->outputs / 32) * result_row(all);
    if (part.bias) part.bias += g.experts[slot] * weights->outputs;
    return part;
}

/* A linear layer of the pairs of `rows` rows, each pair by its own expert's of `weights`. */
static void experts_linear(struct thread *thread, const struct mixture *x, const struct weight *weights, int64_t rows,
                           struct linear all) {
    const int64_t panels = weights->outputs / 32, pairs = rows * x->per_token;
    const struct groups g = groups_at(x, x->groups, rows);
    if (weights->order) reorder_pairs(thread, x, weights, all.x, pairs);
    if (weights->bits && !has_amx) sum_groups(thread, all.x, pairs, weights->inputs, weights->group);
    begin(thread, num_slots(x, rows) * panels);
    for (int64_t next, piece; (piece = take(thread, &next)) >= 0;) {
        const struct linear part = slot_of(x, weights, &all, rows, piece / panels);
        const char *ahead = 0;
        if (next >= 0)
            ahead = (const char *)weights[g.experts[next / panels]].bytes + next % panels * panel_bytes(weights);
        if (part.rows) one_panel(thread, &part, piece % panels, ahead);
        if (win(thread, piece)) put_rows(&part, piece % panels, thread->result), written(thread);
    }
}

/* x and the row's sum go to `out`; `of_all`: what the shared expert has computed, if there is one. */
static void combine_row(const struct model *m, const struct step *s, int64_t row, const bf16 *of_all, float gate,
                        bf16 *out) {
    const struct mixture *x = m->mixture;
    const int64_t hidden = m->hidden;
    const __m512 scale = _mm512_set1_ps(m->residual_scale);
    const int32_t *places = groups_at(x, x->groups, s->rows).places + row * x->per_token;
    for (int64_t i = 0; i < hidden; i += 16) {
        __m512 sum = _mm512_setzero_ps();
        for (int64_t n = 0; n < x->per_token; n++)
            sum = _mm512_fmadd_ps(_mm512_set1_ps(x->shares[row * x->per_token + n]),
                                  load16(x->sorted + places[n] * hidden + i), sum);
        if (of_all) sum = _mm512_fmadd_ps(_mm512_set1_ps(gate), load16(of_all + row * hidden + i), sum);
        store16(out + i, _mm512_fmadd_ps(sum, scale, load16(s->x + row * hidden + i)));
    }
}

static void combine(struct thread *thread, const struct model *m, const struct step *s, const bf16 *of_all,
                    int64_t num_scores) {
    const struct mixture *x = m->mixture;
    const int64_t hidden = m->hidden;
    begin(thread, s->rows);
    for (int64_t next, row; (row = take(thread, &next)) >= 0;) {
        float gate = 1;
        if (x->has_shared_gate) gate = 1 / (1 + expf(-x->scores[row * num_scores + x->count]));
        combine_row(m, s, row, of_all, gate, thread->result);
        if (win(thread, row)) memcpy(s->x + row * hidden, thread->result, hidden * sizeof *s->x), written(thread);
    }
}

/* Adds to s->x what the layer's experts, and its shared expert, make of s->normed. */
static void compute_experts(struct thread *thread, const struct model *m, const struct layer *l, const struct step *s) {
    const struct mixture *x = m->mixture;
    const struct experts *e = l->experts;
    const int64_t rows = s->rows, pairs = rows * x->per_token;
    const int has_shared = l->gate_up.bytes != 0;
    route(thread, x, e, s);
    group(thread, x, rows);
    gather(thread, x, s, m->hidden);
    if (has_shared) {
        linear(thread, (struct linear){.x = s->normed, .weight = &l->gate_up, .bias = l->gate_up_bias, .out = s->inner,
                                       .rows = rows, .kind = m->activation});
        linear(thread, (struct linear){.x = s->inner, .weight = &l->down, .bias = l->down_bias, .out = s->normed,
                                       .rows = rows});
    }
    experts_linear(thread, x, e->gate_up, rows,
                   (struct linear){.x = x->sorted, .bias = e->gate_up_bias, .out = s->inner, .rows = pairs,
                                   .kind = m->activation});
    experts_linear(thread, x, e->down, rows,
                   (struct linear){.x = s->inner, .bias = e->down_bias, .out = x->sorted, .rows = pairs});
    combine(thread, m, s, has_shared ? s->normed : 0, e->router.outputs);
}
