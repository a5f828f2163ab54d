"""Secrets are masked wherever they stand, and nothing else is."""

import pytest
import tomli
import tomli_w

from config import JobConfig, dump_toml
from runtime.masking import MASK, Masker

SECRET = "f81d4fae7dec11d0"


@pytest.mark.parametrize(
    "name",
    [
        *(
            "HF_TOKEN",
            "WANDB_API_KEY",
            "AWS_SECRET_ACCESS_KEY",
            "SLURM_JWT",
            "DB_PASSWORD",
            "DB_PWD",
        ),
        *("GITHUB_TOKEN_2", "CUDA_SECRET", "NCCL_AUTH", "hf_token", "SSH_KEY", "MY_CREDENTIALS"),
    ],
)
def test_value_of_a_secret_variable_is_masked_in_every_text(name: str) -> None:
    masker = Masker({name: SECRET, "NCCL_NOTE": f"x{SECRET}y"})
    assert masker.text(f"a {SECRET} b") == f"a {MASK} b"
    assert SECRET not in str(masker.variables())
    assert masker.arguments(["--data.path", f"/data/{SECRET}"]) == ["--data.path", f"/data/{MASK}"]


def test_only_variables_of_known_libraries_are_kept() -> None:
    kept = {"CUDA_VISIBLE_DEVICES": "0", "NCCL_ALGO": "Ring", "SLURM_JOB_ID": "7", "NGPU": "2"}
    others = {"HOME": "/root", "HF_TOKEN": SECRET, "SLURM": "", "MY_NCCL_ALGO": "", "EDITOR": "vi"}
    assert Masker(kept | others).variables() == kept
    assert Masker({"SLURM_JWT": SECRET}).variables() == {"SLURM_JWT": MASK}


@pytest.mark.parametrize(
    ("arguments", "masked"),
    [
        (["--token", SECRET, "--x.y", "1"], ["--token", MASK, "--x.y", "1"]),
        ([f"--hub.api_key={SECRET}"], [f"--hub.api_key={MASK}"]),
        (["--data.path", "https://me:pass@host/x"], ["--data.path", f"https://{MASK}@host/x"]),
        (["--data.path", "s3://key:se/cret@bucket"], ["--data.path", "s3://key:se/cret@bucket"]),
        # Keys of the configuration that are no secrets.
        (["--validation.sample_tokens", "240"], ["--validation.sample_tokens", "240"]),
        (["--data.text_key", "content"], ["--data.text_key", "content"]),
        (["--data.tokenizer", "bytes"], ["--data.tokenizer", "bytes"]),
        (["--token", "--x.y", "1"], ["--token", "--x.y", "1"]),
    ],
)
def test_arguments(arguments: list[str], masked: list[str]) -> None:
    assert Masker({}).arguments(arguments) == masked


def test_configuration_stays_toml() -> None:
    args = {"eos_token": "<|end|>", "auth_level": 12345678, "keys": ["hf_" + "x" * 20, SECRET]}
    config = {"data": {"path": "https://me:pass@host/x", "text_key": "content", "args": args}}
    masked = tomli.loads(tomli_w.dumps(Masker({"HF_TOKEN": SECRET}).tables(config)))
    args |= {"eos_token": MASK, "keys": [MASK, MASK]}
    assert masked["data"] == config["data"] | {"path": f"https://{MASK}@host/x"}
    plain = tomli.loads(dump_toml(JobConfig()))
    assert Masker({}).tables(plain) == plain


@pytest.mark.parametrize(
    "text",
    [
        "+HF = 'hf_abcdefghijklmnopqrstuvwx'",
        "+export GITHUB_TOKEN=ghp_abcdefghijklmnopqrstuvwx0123456789",
        f'+    "api_key": "{SECRET}",',
        f"+password: {SECRET}",
        f"+API_KEY={SECRET}",
        "+client = Client(secret='two words')",
        "+-----BEGIN RSA PRIVATE KEY-----\n+MIIEpAIBAAKCAQEA\n+-----END RSA PRIVATE KEY-----",
        "+-----BEGIN PRIVATE KEY-----\n+MIIEpAIBAAKCAQEA",
        "+aws = AKIAIOSFODNN7EXAMPLE",
        "+url = git+https://user:hunter22@example.com/x.git",
        "+eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.abc-_DEF",
    ],
)
def test_secrets_in_a_diff(text: str) -> None:
    masked = Masker({}).text(text)
    assert MASK in masked
    secrets = (SECRET, "abcdefgh", "two words", "MIIE", "AKIA", "hunter22", "eyJz")
    assert not [secret for secret in secrets if secret in masked]


@pytest.mark.parametrize(
    "text",
    [
        "+token = sample_token(logits, generator)",
        "+tokens = tokens[i] + 1",
        "+    for key, value in table.items():",
        "+tokenizer = load_tokenizer('cl100k_base')",
        "+secret = load(path)",
        "+next_token: int",
        "+PR = 'https://example.com/a@b'",
    ],
)
def test_code_stays_as_it_is(text: str) -> None:
    assert Masker({}).text(text) == text
