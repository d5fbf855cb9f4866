"""The KV cache as policy: page ids, token ids and integers only; no torch, no kernels."""
