"""Fields of bodies, and the envelope of answers, that OpenAI's APIs share. All APIs may enter."""
