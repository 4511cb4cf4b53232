"""Specs and kernels: what is wanted, and how it is computed."""
