"""Tandem: disaggregated prefill/decode LLM serving."""

__version__ = "0.2.0"
