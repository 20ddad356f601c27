"""Rotary embedding as configurations spell it: four generations of config.json, and GGUF metadata."""

from __future__ import annotations

from ksana.models.fields import Fields
from ksana.models.spec import RopeSpec

LAYER_TYPES = ("full_attention", "sliding_attention")


def rope_from_config(config: Fields, default_theta: float) -> RopeSpec:
    """The rotation of a model that has only one.

    Read from `rope_scaling` or else `rope_parameters` (transformers 5), with `rope_type` or the older `type`,
    and `rope_theta` beside or inside it. Raises ModelLoadError for kinds that are not built.
    """
    section = config.section("rope_scaling") or config.section("rope_parameters")
    theta = config.number("rope_theta", default_theta)
    if section is not None and is_nested(section):
        nested = section.section("full_attention")
        if nested is None:
            raise section.fail("full_attention", "is missing")
        section = nested
    _refuse_partial(config)
    return rope_from_section(section, theta, config.size("max_position_embeddings", 2048))


def is_nested(section: Fields) -> bool:
    """Whether the object holds one rotation per layer type rather than one rotation."""
    return any(isinstance(section.values.get(kind), dict) for kind in LAYER_TYPES)


def rope_from_section(section: Fields | None, theta: float, max_position: int) -> RopeSpec:
    """One rotation from the object that describes it; `theta` is used where the object names none."""
    if section is None:
        return RopeSpec(theta=theta)
    kind = section.text("rope_type", section.text("type", "default"))
    theta = section.number("rope_theta", theta)
    _refuse_partial(section)
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind == "linear":
        return RopeSpec(theta=theta, kind="linear", factor=section.number("factor"))
    if kind == "llama3":
        low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
        if high <= low:
            raise section.fail("high_freq_factor", f"is {high}, not above low_freq_factor {low}")
        return RopeSpec(
            theta=theta,
            kind="llama3",
            factor=section.number("factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position=section.size("original_max_position_embeddings", max_position),
        )
    raise section.fail("rope_type", f"is {kind!r}; supported are default, linear and llama3")


def rope_from_gguf(
    metadata: Fields,
    prefix: str,
    head_dim: int,
    freq_factors: tuple[float, ...] | None,
    default_theta: float = 10_000.0,
) -> RopeSpec:
    """The rotation that `<prefix>.rope.*` describes; `freq_factors` come from the tensor rope_freqs."""
    metadata.refuse_unless(
        f"{prefix}.rope.dimension_count",
        (head_dim,),
        f"a rotation of part of the head ({head_dim}) is not built",
    )
    theta = metadata.number(f"{prefix}.rope.freq_base", default_theta)
    kind = metadata.text(f"{prefix}.rope.scaling.type", "none")
    old_spelling = f"{prefix}.rope.scale_linear"
    if kind == "none" and old_spelling in metadata:
        return RopeSpec(
            theta=theta, kind="linear", factor=metadata.number(old_spelling), freq_factors=freq_factors
        )
    if kind == "none":
        return RopeSpec(theta=theta, freq_factors=freq_factors)
    if kind == "linear":
        factor = metadata.number(f"{prefix}.rope.scaling.factor")
        return RopeSpec(theta=theta, kind="linear", factor=factor, freq_factors=freq_factors)
    raise metadata.fail(f"{prefix}.rope.scaling.type", f"is {kind!r}; supported are none and linear")


def _refuse_partial(section: Fields) -> None:
    section.refuse_unless("partial_rotary_factor", (1, 1.0), "a rotation of part of the head is not built")
