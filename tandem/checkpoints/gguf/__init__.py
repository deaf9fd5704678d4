"""GGUF files, made into the folder that every process reads models from. The rest of checkpoints may enter.

model.gguf ── config.py ───> config.json, generation_config.json      what the decoder needs
           ── tokenizer.py ─> tokenizer.json, tokenizer_config.json    words, merges, chat template
           ── folder.py ───> tensors.json, model.gguf (a link)         where each tensor lies, for the engine
"""

from tandem.checkpoints.gguf.folder import TENSORS_FILE, WEIGHTS_FILE, as_folder, folder_of

__all__ = ["TENSORS_FILE", "WEIGHTS_FILE", "as_folder", "folder_of"]
