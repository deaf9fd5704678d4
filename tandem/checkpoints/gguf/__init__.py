"""GGUF files, converted to the kind of folder that every process reads. The rest of checkpoints may enter.

model.gguf ── config.py ───> config.json, generation_config.json      for the decoder
           ── tokenizer.py ─> tokenizer.json, tokenizer_config.json    words, merges, chat template
           ── folder.py ───> tensors.json, model.gguf (a link)         the place of each tensor, for the engine
"""

from tandem.checkpoints.gguf.folder import TENSORS_FILE, WEIGHTS_FILE, as_folder, folder_of

__all__ = ["TENSORS_FILE", "WEIGHTS_FILE", "as_folder", "folder_of"]
