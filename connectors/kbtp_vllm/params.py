"""`kv_transfer_params`, typed: what prefill's answer tells decode by way of the router.

The names are those of vLLM's NIXL connector, so that its routers pass them on as they are; what KBTP adds starts with
`kbtp_`. Numbers of 64 bits travel as hexadecimal text, since a router may parse JSON into floating point.

The parameters come from outside: they are checked here, and a bad one is a miss (decode computes the prompt), never a crash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from kbtp_core.errors import KbtpError
from kbtp_vllm.messages import WorkerAddress

FORMAT = 1
NO_BLOCK = 0
"""In `kbtp_handles`: no block at this position (out of a sliding window). Handle 0 is always the geometry descriptor's."""
HANDLE_LIMIT = 1 << 17
"""Block positions that one request may name, over all KV groups; counted before any is parsed."""

Handle = Annotated[int, Field(ge=0, lt=1 << 53)]
Generation = Annotated[int, Field(ge=0, lt=1 << 16)]


class BadParameters(KbtpError):
    """Remote: `kv_transfer_params` that name no usable blocks; the request is computed here instead."""


class Worker(BaseModel):
    model_config = ConfigDict(frozen=True)

    host: str = Field(min_length=1, max_length=255)
    port: int = Field(ge=1, le=65535)
    incarnation: str = Field(pattern="^[0-9a-f]{16}$")

    def address(self) -> WorkerAddress:
        return WorkerAddress(self.host, self.port, int(self.incarnation, 16))


class RemotePrefill(BaseModel):
    """A finished prefill whose blocks wait to be pulled. Handles and generations: a list a KV group, an entry a block position."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    remote_engine_id: str = Field(min_length=1, max_length=255)
    remote_request_id: str = Field(min_length=1, max_length=1024)
    remote_num_tokens: int = Field(ge=1)
    tp_size: int = Field(ge=1)
    pp_size: int = Field(ge=1)
    kbtp_format: Literal[1]
    kbtp_prompt: str = Field(pattern="^[0-9a-f]{64}$")
    kbtp_workers: list[Worker] = Field(min_length=1, max_length=4096)
    kbtp_handles: list[list[Handle]] = Field(min_length=1, max_length=256)
    kbtp_generations: list[list[Generation]] = Field(max_length=256)

    @field_validator("kbtp_handles", "kbtp_generations", mode="before")
    @classmethod
    def _not_too_many(cls, groups: Any) -> Any:
        if isinstance(groups, list):
            count = sum(len(group) for group in groups if isinstance(group, list))
            if count > HANDLE_LIMIT:
                raise ValueError(f"{count} block positions, at most {HANDLE_LIMIT} are read")
        return groups

    @model_validator(mode="after")
    def _same_lengths(self) -> RemotePrefill:
        if [len(group) for group in self.kbtp_handles] != [len(group) for group in self.kbtp_generations]:
            raise ValueError("kbtp_handles and kbtp_generations differ in length")
        pairs = [pair for lists in zip(self.kbtp_handles, self.kbtp_generations, strict=True) for pair in zip(*lists, strict=True)]
        blocks = [(handle, generation) for handle, generation in pairs if handle != NO_BLOCK]
        if not blocks:
            raise ValueError("kbtp_handles names no block at all")
        if not all(generation for _, generation in blocks):
            raise ValueError("kbtp_generations has 0 for a block, which would accept any block; a generation is 1 or more")
        if len(self.kbtp_workers) != self.tp_size * self.pp_size:
            raise ValueError(f"kbtp_workers names {len(self.kbtp_workers)} workers, tp_size * pp_size is {self.tp_size * self.pp_size}")
        return self

    def workers(self) -> tuple[WorkerAddress, ...]:
        return tuple(worker.address() for worker in self.kbtp_workers)


def parse_remote_prefill(params: dict[str, Any]) -> RemotePrefill:
    """Raises BadParameters, which names the field."""
    if "kbtp_format" not in params:
        raise BadParameters("kv_transfer_params has no kbtp_format: prefill does not use KBTPConnector, or the router drops fields.")
    try:
        return RemotePrefill.model_validate(params)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        raise BadParameters(f"kv_transfer_params: {'.'.join(str(part) for part in first['loc']) or 'fields'}: {first['msg']}.") from error


def describe_prefill(
    *,
    engine_id: str,
    request_id: str,
    token_count: int,
    block_tokens: int,
    tp_size: int,
    pp_size: int,
    prompt: str,
    workers: Sequence[WorkerAddress],
    block_ids: Sequence[Sequence[int]],
    handles: list[list[int]],
    generations: list[list[int]],
) -> dict[str, Any]:
    """The parameters that prefill answers with; `parse_remote_prefill` reads them."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_request_id": request_id,
        "remote_block_ids": [list(group) for group in block_ids],
        "remote_host": workers[0].host,
        "remote_port": workers[0].port,
        "remote_num_tokens": token_count,
        "remote_block_size": block_tokens,
        "remote_blocks_expiry_time": None,
        "tp_size": tp_size,
        "dcp_size": 1,
        "pp_size": pp_size,
        "transfer_mode": "pull",
        "kbtp_format": FORMAT,
        "kbtp_prompt": prompt,
        "kbtp_workers": [{"host": w.host, "port": w.port, "incarnation": f"{w.incarnation:016x}"} for w in workers],
        "kbtp_handles": handles,
        "kbtp_generations": generations,
    }


def prompt_fingerprint(request: Any) -> str | None:
    """Name everything of a vLLM request that its prompt's KV depends on, as hexadecimal text; None if it has no token ids.

    Decode compares it with its own request's, so that a router which mixes two prompts up costs time and not answers.
    """
    tokens = request.prompt_token_ids
    if tokens is None or getattr(request, "prompt_embeds", None) is not None:
        return None
    digest = hashlib.sha256(np.asarray(tokens, dtype="<i8").tobytes())
    lora = request.lora_request
    digest.update(repr(lora.lora_name if lora is not None else None).encode())
    for feature in getattr(request, "mm_features", None) or ():
        digest.update(repr((feature.identifier, feature.mm_position.offset, feature.mm_position.length)).encode())
    return digest.hexdigest()
