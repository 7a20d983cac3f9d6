"""minispec: speculative decoding for Kimi-K2.5 with EAGLE-3 draft trees, from scratch."""
