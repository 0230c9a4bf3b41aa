"""KBTP: KV cache blocks between LLM serving engines.

Layers, and arrows go down only: `transfer` (blocks between two engines) → `session` (one protocol machine on one queue
pair) → `protocol` (sans-I/O) and `fabric` (verbs-shaped providers; `softrnic` runs over plain TCP).
"""

__version__ = "0.1.0"
