"""Other forms of a GGUF model, made for tests: other storage types, and a Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path

import gguf

from ksana.models.gguf_file import GgufFile


def requantize_gguf(source: Path, target: Path, type_name: str) -> None:
    """The same metadata and tensors with every matrix stored as `type_name`."""
    reader = gguf.GGUFReader(str(source))
    weights = GgufFile(source)
    writer = gguf.GGUFWriter(str(target), weights.get("general.architecture"))
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            item_type = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=item_type)
    for name, tensor in weights.tensors.items():
        ggml_type = gguf.GGMLQuantizationType[type_name if len(tensor.shape) == 2 else "F32"]
        stored = gguf.quants.quantize(weights.read(name), ggml_type)
        writer.add_tensor(name, stored, raw_dtype=ggml_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def save_as_directory(source: Path, target: Path) -> None:
    """What transformers makes of a GGUF file, saved: config, safetensors (float32), tokenizer, template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, name = str(source.parent), source.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    if GgufFile(source).get("tokenizer.ggml.pre") == "smollm":
        _split_digits(tokenizer.backend_tokenizer)
    tokenizer.save_pretrained(str(target))
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    # A model loaded from GGUF says it is quantized, and such a one is not saved; its weights are plain.
    for attribute in ("hf_quantizer", "quantization_method", "is_quantized"):
        if hasattr(model, attribute):
            delattr(model, attribute)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(str(target))
    assert "quantization_config" not in json.loads((target / "config.json").read_text())


def _split_digits(tokenizer: object) -> None:
    """SmolLM's tokenizer takes digits one by one, which transformers' reading of GGUF leaves out."""
    from tokenizers import pre_tokenizers

    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[attr-defined]
        [pre_tokenizers.Digits(individual_digits=True), tokenizer.pre_tokenizer]  # type: ignore[attr-defined]
    )
