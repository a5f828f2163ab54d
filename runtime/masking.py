"""Mask secrets in what is kept of a start: environment variables, command lines, diffs."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

MASK = "***"
# Names of variables and arguments whose values are secret. "tokens" and "tokenizer" are not.
SECRET_NAME = re.compile(
    r"token(?![a-z])|secret|passw|passphrase|_pwd|credential|jwt|cookie|bearer|auth(?!or)"
    r"|(api|access|private|secret|account|encryption|ssh|signing)_?key|(?<!text)[_-]key$|^key$",
    re.IGNORECASE,
)
# Variables that are kept: of libraries that compute and communicate, of Slurm, of the launcher.
KEPT = re.compile(
    r"(ATEN|CUBLAS|CUBLASLT|CUDA|CUDNN|DNNL|FI|FLA|GLOO|GOMP|HIP|HSA|KMP|MALLOC|MKL|NCCL|NVIDIA|OMP"
    r"|ONEDNN|OPENBLAS|PYTORCH|RCCL|ROCR|SLURM|TORCH|TORCHDYNAMO|TORCHINDUCTOR|TRITON|UCX|XLA)_\w+"
    r"|CONFIG_FILE|LD_LIBRARY_PATH|LD_PRELOAD|LOG_RANK|MASTER_ADDR|MASTER_PORT|NGPU|NNODES|NODE_RANK"
    r"|PYTHON|PYTHONHASHSEED|PYTHONPATH|SITE|SWEEP|VIRTUAL_ENV"
)
# Credentials in URLs; tokens of known services; keys; literals that are assigned to secret names.
PATTERNS = (
    (re.compile(r"(\w://)[^/\s@\"']+@"), rf"\1{MASK}@"),
    (
        re.compile(
            r"\b(hf_\w{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|sk-[\w-]{16,}"
            r"|xox[abeprs]-[\w-]{10,}|(AKIA|ASIA)[0-9A-Z]{16}|AIza[\w-]{30,}"
            r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
        ),
        MASK,
    ),
    (
        re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(-----END|\Z)", re.DOTALL),
        rf"\1{MASK}\2",
    ),
    (
        re.compile(
            r"((?:token|secret|passw(?:or)?d|passphrase|credentials?|jwt|cookie|bearer|auth"
            r"|(?:api|access|private|account)_?key)[\"']?[ \t]*(?:=>|[:=])[ \t]*)"
            r"(?:(?P<quote>[\"']).+?(?P=quote)|(?=\S*\d)[\w+/=.~-]{8,}(?=[\s,;&\"']|\Z))",
            re.IGNORECASE,
        ),
        rf"\1{MASK}",
    ),
)
MOST_CHARACTERS = 4096
"""Of a variable's value, and of an argument."""


class Masker:
    """Masks secrets by their names, by their form, and the values of this environment's secrets."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        values = {v for name, v in environment.items() if SECRET_NAME.search(name) and len(v) >= 8}
        # The longest first, because one may contain another.
        self._values = sorted(values, key=len, reverse=True)
        self._environment = environment

    def text(self, text: str) -> str:
        """Mask secrets in a text of any length."""
        for value in self._values:
            text = text.replace(value, MASK)
        for pattern, replacement in PATTERNS:
            text = pattern.sub(replacement, text)
        return text

    def tables(self, value: Any, name: str = "") -> Any:
        """Mask secrets in the tables of a configuration, or in the value of the key ``name``."""
        if isinstance(value, dict):
            return {key: self.tables(each, key) for key, each in value.items()}
        if isinstance(value, list):
            return [self.tables(each, name) for each in value]
        if not isinstance(value, str):
            return value
        return MASK if value and SECRET_NAME.search(name) else self.text(value)

    def arguments(self, arguments: Iterable[str]) -> list[str]:
        """Mask the arguments of a command, ``--name VALUE`` and ``--name=VALUE``."""
        masked, is_secret = [], False
        for argument in arguments:
            name, equals, _ = argument.partition("=")
            names_secret = argument.startswith("-") and bool(SECRET_NAME.search(name))
            if is_secret and not argument.startswith("-"):
                argument = MASK
            elif names_secret and equals:
                argument = f"{name}={MASK}"
            masked.append(self.text(argument)[:MOST_CHARACTERS])
            is_secret = names_secret and not equals
        return masked

    def variables(self) -> dict[str, str]:
        """Return the environment variables that are kept, sorted by name."""
        return {
            name: MASK if SECRET_NAME.search(name) else self.text(value)[:MOST_CHARACTERS]
            for name, value in sorted(self._environment.items())
            if KEPT.fullmatch(name)
        }
