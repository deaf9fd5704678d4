"""A worker's life: built, registered, watched, drained, replaced; its process and its crashes. Workers may enter."""
