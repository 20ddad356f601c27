"""All model families. A new one is a file with a `FAMILY` and a line here."""

from __future__ import annotations

from ksana.errors import ModelLoadError
from ksana.models import gemma3, llama
from ksana.models.family import Family
from ksana.shown import shown

FAMILIES: dict[str, Family] = {module.FAMILY.name: module.FAMILY for module in (llama, gemma3)}


def family_of_config(architectures: list[str], source: str) -> Family:
    """The family of a config.json's `architectures`. Raises ModelLoadError when there is none."""
    for family in FAMILIES.values():
        if any(name in family.config_architectures for name in architectures):
            return family
    known = sorted(name for family in FAMILIES.values() for name in family.config_architectures)
    raise ModelLoadError(
        f"{source}: architecture {shown(architectures)} is not supported; supported are {', '.join(known)}"
    )


def family_of_gguf(architecture: str, source: str) -> Family:
    """The family of a GGUF file's `general.architecture`. Raises ModelLoadError when there is none."""
    for family in FAMILIES.values():
        if architecture in family.gguf_architectures:
            return family
    known = sorted(name for family in FAMILIES.values() for name in family.gguf_architectures)
    raise ModelLoadError(
        f"{source}: GGUF architecture {shown(architecture)} is not supported; "
        f"supported are {', '.join(known)}"
    )
