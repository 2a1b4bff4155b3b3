"""Attention over packed documents, as plain functions: one entry, several backends, and a cache for generation."""

from automimo.attention.cache import KVCache
from automimo.attention.context import ContextAttention, SharedLayout, check_heads, choose_halo, share_layout
from automimo.attention.dispatch import attend, available_backends
from automimo.attention.layout import DenseLayout, DocumentLayout, build_layout

__all__ = [
    "ContextAttention",
    "DenseLayout",
    "DocumentLayout",
    "KVCache",
    "SharedLayout",
    "attend",
    "available_backends",
    "build_layout",
    "check_heads",
    "choose_halo",
    "share_layout",
]
