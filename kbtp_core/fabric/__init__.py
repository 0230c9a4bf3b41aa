"""Verbs-shaped providers. Nothing here knows KBTP; `api` is the interface, `softrnic` the software RNIC."""
