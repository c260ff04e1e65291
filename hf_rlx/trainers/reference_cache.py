"""Log-probs of the reference on disk: computed once for a data set, a model, a template and a length.

One file holds the log-probs of every answer token of one data set. Its name is a hash of all that they follow from:
the token ids of every prompt and answer (data, tokenizer, template and cuts in one), every bit of the reference's
weights, its configuration, and the precision. What is read back is found by the token ids of its prompt and answers,
so that a log-prob can never be taken for another row's.

    <hash>.safetensors      digests (G, 16) uint8, tokens (G,) int64, logps (N,) float32; its sha256 in the metadata
    .<hash>.<pid>           written here first, flushed, then renamed
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import load as from_bytes
from safetensors.torch import save_file
from torch import Tensor, nn

from hf_rlx.models import reference
from hf_rlx.models.roles import REFERENCE, belongs
from hf_rlx.types import Group

if TYPE_CHECKING:
    from hf_rlx.models.shared import SharedModel

logger = logging.getLogger(__name__)

_FORMAT = "hf_rlx reference log-probs 1"
_SIZE = 16  # bytes of a digest
_UNREAD = re.compile("^_|^use_cache$|_token_id$")  # settings that no log-prob follows from, and trainers set


def digest(group: Group) -> bytes:
    """16 bytes that stand for the token ids of a prompt and its answers, in their order."""
    total = hashlib.blake2b(digest_size=_SIZE)
    for ids in (group.prompt_ids, *group.response_ids):
        total.update(ids.numel().to_bytes(8, "little"))
        total.update(ids.cpu().long().numpy().tobytes())
    return total.digest()


def weights_digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """A hash over the names, types, shapes and bits of tensors, whatever their order."""
    total = hashlib.blake2b(digest_size=_SIZE)
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def base_tensors(model: nn.Module, adapters: Iterable[str] = ()) -> Iterable[tuple[str, Tensor]]:
    """The tensors of a model without those of `adapters`, by the names that they have without any adapter."""
    names = tuple(adapters)
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor) and not any(belongs(name, adapter) for adapter in names):
            yield name.replace(".base_layer.", ".").replace(".original_module.", "."), tensor


def reference_facts(shared: SharedModel) -> dict[str, Any]:
    """What the reference's log-probs of given tokens follow from: weights, configuration, kind of reference."""
    kind = reference.kind(shared)
    config = shared.frozen_copies.get(REFERENCE, shared.causal_lm).config
    facts: dict[str, Any] = {"config": {k: v for k, v in config.to_dict().items() if not _UNREAD.search(k)}}
    if kind == "model_copy":
        return facts | {"weights": weights_digest(base_tensors(shared.frozen_copies[REFERENCE]))}
    adapters = list(shared.model.peft_config) if isinstance(shared.model, PeftModel) else []
    facts["weights"] = weights_digest(base_tensors(shared.causal_lm, adapters))
    if kind == "adapter_copy":
        own = ((n, t) for n, t in shared.causal_lm.state_dict().items() if belongs(n, REFERENCE))
        facts["adapter"] = weights_digest(own)
        settings = shared.model.peft_config[REFERENCE].to_dict()
        facts["adapter_config"] = {k: sorted(v) if isinstance(v, set) else v for k, v in settings.items()}
    return facts


def key_of(digests: Sequence[bytes], facts: dict[str, Any]) -> str:
    """The name of the file for these answers and facts."""
    told = json.dumps(facts, sort_keys=True, default=str).encode()
    return hashlib.sha256(b"".join([_FORMAT.encode(), hashlib.sha256(told).digest(), *digests])).hexdigest()[:40]


def store(folder: Path, key: str, logps: dict[bytes, Tensor]) -> Path:
    """Write log-probs, whole or not at all; returns the file.

    Args:
        logps: digest of a group -> (T,) nats, of all its answers' tokens, answer after answer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target, staged = folder / f"{key}.safetensors", folder / f".{key}.{os.getpid()}"
    tensors = {
        "digests": torch.tensor([list(name) for name in logps], dtype=torch.uint8).reshape(-1, _SIZE),
        "tokens": torch.tensor([values.numel() for values in logps.values()], dtype=torch.int64),
        "logps": torch.cat([torch.empty(0), *logps.values()]).float(),
    }
    try:
        save_file(tensors, staged, metadata={"format": _FORMAT, "key": key, "sha256": _checksum(tensors)})
        with staged.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(staged, target)
    finally:
        staged.unlink(missing_ok=True)
    return target


def load(folder: Path, key: str) -> dict[bytes, Tensor] | None:
    """What `store` wrote; None where there is no such file, or a damaged one, which is told."""
    path = folder / f"{key}.safetensors"
    if not path.is_file():
        return None
    try:
        # Read as a whole: a mapped file that is cut short later ends the process.
        data = path.read_bytes()
        tensors = from_bytes(data)
        about = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__", {})
        if (about.get("format"), about.get("key"), about.get("sha256")) != (_FORMAT, key, _checksum(tensors)):
            raise ValueError("its contents are not those that were written")
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        logger.warning("%s is damaged (%s): the reference's log-probs are computed anew", path, error)
        return None
    parts = tensors["logps"].split(tensors["tokens"].tolist())
    names = tensors["digests"].numpy()
    return {name.tobytes(): part for name, part in zip(names, parts, strict=True)}


def _checksum(tensors: dict[str, Tensor]) -> str:
    total = hashlib.sha256()
    for name in ("digests", "tokens", "logps"):
        total.update(tensors[name].contiguous().numpy().tobytes())
    return total.hexdigest()


__all__ = ["base_tensors", "digest", "key_of", "load", "reference_facts", "store", "weights_digest"]
