"""A chain of samplers in the form that a receipt states."""

import hashlib

import msgspec

from shared.messages import Dry, SamplerChain


def told(chain: SamplerChain) -> dict[str, object]:
    """Returns the chain with the names of the API. The breakers of DRY appear only as a hash."""
    names = [name for name in chain.__struct_fields__ if chain.mirostat or not name.startswith("mirostat")]
    names.remove("reports")  # does not change a token
    values = {name: value for name in names if (value := getattr(chain, name)) is not None}
    if chain.penalties is not None:
        values["penalties"] = msgspec.structs.asdict(chain.penalties)
    if chain.dry is not None:
        values["dry"] = _dry(chain.dry)
    return values


def _dry(dry: Dry) -> dict[str, object]:
    kept = {name: getattr(dry, name) for name in ("multiplier", "base", "allowed_length", "last_n")}
    digest = hashlib.sha256(msgspec.msgpack.encode((dry.breakers, dry.long_breakers))).hexdigest()
    return kept | {"breakers_sha256": digest}
