"""Rotary embedding as configurations spell it: four generations of config.json, and GGUF metadata."""

from __future__ import annotations

from ksana.models.fields import Fields
from ksana.models.spec import RopeSpec
from ksana.shown import shown

LAYER_TYPES = ("full_attention", "sliding_attention")


def rope_from_config(config: Fields, default_theta: float) -> RopeSpec:
    """The rotation of a model that has only one.

    Read from `rope_scaling` and `rope_parameters` (transformers 5), with `rope_type` or the older `type`, and
    `rope_theta` beside or inside them. Raises ModelLoadError for kinds that are not built.
    """
    sections = rope_sections(config)
    if sections.keys() == {"sliding_attention"}:
        raise config.fail("rope_parameters", "has no full_attention")
    _refuse_partial(config)
    return rope_from_section(
        sections.get("full_attention"),
        config.number("rope_theta", default_theta),
        config.size("original_max_position_embeddings", config.size("max_position_embeddings", 2048)),
    )


def rope_sections(config: Fields) -> dict[str, Fields]:
    """By layer type, the object that describes its rotation; none for a type without one.

    `rope_scaling` and `rope_parameters` may both be there, each with a part of it: what one has and the other
    lacks counts, an empty one says nothing, and two values of one thing are refused. An object that is not by
    layer type is that of the full layers, as transformers reads it.
    """
    found: dict[str, Fields] = {}
    for name in ("rope_parameters", "rope_scaling"):
        section = config.section(name)
        if section is None:
            continue
        named = {kind: section.section(kind) for kind in LAYER_TYPES if kind in section}
        for kind, part in (named or {"full_attention": section}).items():
            if part is not None and part.values:
                found[kind] = _joined(found[kind], part) if kind in found else part
    return found


def _joined(first: Fields, second: Fields) -> Fields:
    """Both objects as one. `type` is an older name of `rope_type`."""
    one, two = (
        {
            ("rope_type" if key == "type" else key): value
            for key, value in part.values.items()
            if value is not None
        }
        for part in (_typed(first), _typed(second))
    )
    for key in one.keys() & two.keys():
        if one[key] != two[key]:
            raise second.fail(key, f"is {shown(two[key])}, but {shown(one[key])} in {first.source}")
    return Fields(one | two, second.source)


def _typed(section: Fields) -> Fields:
    """Without `type` where `rope_type` is there, which then counts."""
    if "rope_type" not in section:
        return section
    return Fields({key: value for key, value in section.values.items() if key != "type"}, section.source)


def rope_from_section(section: Fields | None, theta: float, max_position: int) -> RopeSpec:
    """One rotation from the object that describes it; `theta` is used where the object names none."""
    if section is None:
        return RopeSpec(theta=theta)
    kind = section.text("rope_type") if "rope_type" in section else section.text("type", "default")
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
    raise section.fail("rope_type", f"is {shown(kind)}; supported are default, linear and llama3")


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
    raise metadata.fail(f"{prefix}.rope.scaling.type", f"is {shown(kind)}; supported are none and linear")


def _refuse_partial(section: Fields) -> None:
    section.refuse_unless("partial_rotary_factor", (1, 1.0), "a rotation of part of the head is not built")
