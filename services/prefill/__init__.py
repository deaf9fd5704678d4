"""The prefill room: prompt tokens in; first token out, KV blocks pushed."""
