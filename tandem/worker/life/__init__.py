"""A worker's life: build, registration, watchdogs, drain, succession; its process and crashes. Workers may enter."""
