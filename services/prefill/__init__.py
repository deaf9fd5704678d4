"""The prefill service: prompt tokens in; first token out, KV blocks pushed."""
