"""Logits match Hugging Face's models, and configs survive the round trip.

In float64, so that a slightly wrong epsilon or frequency exceeds rounding errors.
"""

import json
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import pytest
import torch

from models import MODEL_SPECS
from models.hugging_face import ATTENTION, FEED_FORWARD, NORMS, Table, build_hugging_face
from models.qwen3_next import Qwen3NextArgs
from models.transformer import Transformer, TransformerArgs
from tests.lib.hugging_face import (
    CASES,
    LLAMA31,
    SEQ_LEN,
    SHARED,
    TOLERANCE,
    config_of,
    float64_for_float32,
    form_of,
    hugging_face,
)

transformers = pytest.importorskip("transformers")


def shardloom_model(config: Any, weights: dict[str, torch.Tensor]) -> Transformer:
    """Build the Shardloom model of a Hugging Face ``config`` and ``weights``."""
    form = form_of(config.model_type)
    args = form.args(config.to_dict())
    model = Transformer(args).double()
    model.init_weights()
    pairs = form.tensors(args)
    assert {name for pair in pairs for name in pair.hf_names} == weights.keys()
    model.load_state_dict({pair.fqn: weights[pair.hf_names[0]] for pair in pairs})
    return model


@torch.no_grad()
def max_difference(case: str, **changed: Any) -> float:
    """Return the max difference of logits; ``changed`` options apply to Shardloom only."""
    with float64_for_float32():
        hf_model = hugging_face(case)
        tokens = torch.randint(SHARED["vocab_size"], (2, SEQ_LEN))
        want = hf_model(tokens).logits
    got = shardloom_model(config_of(case, **changed), hf_model.state_dict())(tokens)
    assert want.dtype == got.dtype == torch.float64
    return (got - want).abs().max().item()


@pytest.mark.parametrize("case", CASES)
def test_logits_match_hugging_face(case: str) -> None:
    assert max_difference(case) < TOLERANCE


@pytest.mark.parametrize(
    ("case", "changed"),
    [
        ("llama", {"rms_norm_eps": 1.001e-3}),
        ("qwen3", {"rms_norm_eps": 1.001e-3}),
        ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 10_010.0}}),
        *(("llama31", {"rope_parameters": LLAMA31 | {key: 1.001 * LLAMA31[key]}})
          for key in ("factor", "low_freq_factor", "high_freq_factor")),
    ],
)  # fmt: skip
def test_an_option_wrong_by_a_thousandth_is_detected(case: str, changed: dict[str, Any]) -> None:
    assert max_difference(case, **changed) > 100 * TOLERANCE


FLAVORS = {
    f"{name}-{flavor}": (spec.hugging_face, args)
    for name, spec in MODEL_SPECS.items()
    for flavor, args in spec.flavors.items()
    if spec.hugging_face is not None
}


@pytest.mark.parametrize("flavor", FLAVORS)
def test_config_round_trip_through_transformers(flavor: str) -> None:
    """Args survive Shardloom's config.json, transformers' reading and its writing."""
    form, args = FLAVORS[flavor]
    config = form.config(args)
    assert form.args(json.loads(json.dumps(config))) == args
    hf_config = transformers.AutoConfig.for_model(**config)
    assert type(hf_config).__name__.removesuffix("Config") in hf_config.architectures[0]
    # Older keys, which transformers reads but does not keep.
    older = {"rope_theta", "rope_scaling", "partial_rotary_factor", "full_attention_interval"}
    for key in config.keys() - {"model_type", *older}:
        assert getattr(hf_config, key) == config[key], key
    assert form.args(hf_config.to_dict()) == args
    # The older rotary keys alone mean the same.
    without = {key: value for key, value in config.items() if key != "rope_parameters"}
    assert form.args(without) == args
    older_in_new = transformers.AutoConfig.for_model(**without)
    assert older_in_new.rope_parameters == hf_config.rope_parameters == config["rope_parameters"]


# As published with Llama 3.1 and 3.2, without the keys that the oldest files lack.
OLDER = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 61,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": None,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize("scaling", [None, {k: v for k, v in LLAMA31.items() if k != "rope_theta"}])
def test_older_configs_match_transformers(scaling: Any) -> None:
    older = OLDER | {"rope_scaling": scaling}
    args = form_of("llama").args(older)
    assert (args.head_dim, args.n_kv_heads, args.tie_embeddings) == (16, 4, False)
    assert (args.rope_scaling is None) == (scaling is None)
    # transformers removes entries from its argument, hence the copy.
    hf_config = transformers.AutoConfig.for_model(**json.loads(json.dumps(older)))
    assert form_of("llama").args(hf_config.to_dict()) == args


@dataclass(frozen=True, kw_only=True)
class Windowed(TransformerArgs):
    # A string, as in a module that postpones annotations.
    window: "int"


def test_table_may_have_arguments_of_its_own() -> None:
    layer = NORMS | ATTENTION | FEED_FORWARD
    table = partial(Table, "windowed", "WindowedForCausalLM", layer=layer)
    own = table(args_cls=Windowed, numbers={"sliding_window": "window"})
    form = build_hugging_face(replace(own, family_args={"qk_norm": False}))
    args = Windowed(**vars(form_of("llama").args(OLDER)), window=24)
    config = form.config(args)
    assert config["sliding_window"] == 24
    assert form.args(config) == args
    with pytest.raises(ValueError, match="sliding_window: 'wide'"):
        form.args(config | {"sliding_window": "wide"})


@dataclass(frozen=True, kw_only=True)
class MaybeWindowed(TransformerArgs):
    window: int | None = None
    softcap: float | None = None
    mode: str = "causal"


@pytest.mark.parametrize("own", [{}, {"window": 24}, {"softcap": 0.5}, {"window": 8, "softcap": 2}])
def test_number_of_a_table_may_be_absent(own: dict[str, Any]) -> None:
    numbers = {"sliding_window": "window", "attn_logit_softcapping": "softcap"}
    table = partial(
        Table, "windowed", "WindowedForCausalLM", layer=NORMS | ATTENTION | FEED_FORWARD
    )
    form = build_hugging_face(table(args_cls=MaybeWindowed, numbers=numbers))
    args = MaybeWindowed(**vars(form_of("llama").args(OLDER)), **own)
    config = form.config(args)
    assert form.args(config) == args
    assert form.args({key: value for key, value in config.items() if value is not None}) == args
    with pytest.raises(ValueError, match=r"sliding_window: 0\.5 \(supported: an integer"):
        form.args(config | {"sliding_window": 0.5})
    with pytest.raises(ValueError, match=r"numbers has 'mode': 'mode', but that is .*str"):
        table(args_cls=MaybeWindowed, numbers={"mode": "mode"})
    for numbers, args_cls in (
        ({"sliding_window": "window"}, TransformerArgs),
        ({"window": "sliding_window"}, Windowed),
    ):
        with pytest.raises(
            ValueError, match=f"WindowedForCausalLM.*args_cls {args_cls.__name__} no"
        ):
            table(args_cls=args_cls, numbers=numbers)


SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0}
UNSUPPORTED = [
    (
        "rope_scaling",
        {"rope_scaling": SCALED | {"low_freq_factor": 9.0, "original_max_position_embeddings": 64}},
    ),
    ("model_type", {"model_type": "mistral"}),
    ("architectures", {"architectures": ["LlamaForSequenceClassification"]}),
    ("attention_bias", {"attention_bias": True}),
    ("mlp_bias", {"mlp_bias": True}),
    ("hidden_act", {"hidden_act": "gelu"}),
    ("attention_dropout", {"attention_dropout": 0.1}),
    ("quantization_config", {"quantization_config": {"quant_method": "fp8"}}),
    ("partial_rotary_factor", {"partial_rotary_factor": 0.5}),
    ("sliding_window", {"sliding_window": 32}),
    ("sliding_window", {"sliding_window": 32, "use_sliding_window": True}),
    ("layer_types", {"layer_types": ["full_attention", "sliding_attention"]}),
    ("layer_types", {"layer_types": 3}),
    ("tie_word_embeddings", {"tie_word_embeddings": "yes"}),
    ("rope_type", {"rope_parameters": YARN}),
    ("rope_type", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("rope_type", {"rope_scaling": {"rope_type": ["llama3"]}}),
    ("rope_scaling", {"rope_scaling": 8.0}),
    ("original_max_position_embeddings", {"rope_scaling": SCALED}),
    ("attention_factor", {"rope_parameters": {"rope_theta": 5e5, "attention_factor": 1.0}}),
    ("full_attention", {"rope_parameters": {"full_attention": {"rope_theta": 5e5}}}),
    ("rope_theta", {"rope_parameters": {"rope_theta": 1e4}}),
    ("rope_theta", {"rope_theta": None}),
    ("rope_theta", {"rope_theta": math.nan}),
    ("rope_theta", {"rope_theta": True}),
    ("hidden_size", {"hidden_size": None}),
    ("hidden_size", {"hidden_size": 64.0}),
    ("hidden_size", {"hidden_size": 10**400}),
    ("rms_norm_eps", {"rms_norm_eps": 10**400}),
    ("head_dim", {"head_dim": 15}),
    ("head_dim", {"num_attention_heads": 65}),
    ("num_attention_heads", {"num_attention_heads": 0}),
    ("num_key_value_heads", {"num_key_value_heads": 3}),
    ("num_hidden_layers", {"num_hidden_layers": -2}),
    ("rms_norm_eps", {"rms_norm_eps": math.inf}),
    ("vocab_size", {"vocab_size": "61"}),
]


@pytest.mark.parametrize(("key", "changed"), UNSUPPORTED)
def test_unsupported_config_raises_by_key(key: str, changed: dict[str, Any]) -> None:
    assert form_of("llama").args(OLDER).dim == 64
    with pytest.raises(ValueError, match=f"^{key}: |\\b{key} = "):
        form_of("llama").args(OLDER | changed)


QUARTER = {"partial_rotary_factor": 0.25, "rope_theta": 5e5}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("partial_rotary_factor", math.inf),
        ("partial_rotary_factor", 0),
        ("rope_parameters", 1),
        ("layer_types", 1),
        ("layer_types", [1]),
        # Its older keys are 0.5, and attention in every second layer.
        ("partial_rotary_factor", {"rope_parameters": QUARTER}),
        ("layer_types", ["full_attention"] * 4),
        ("rotary_dim", 10 / 32 + 1 / 32),
        ("linear_num_value_heads", 3),
        ("linear_num_key_heads", "2"),
    ],
)
def test_unsupported_config_of_qwen3_next_raises_by_key(key: str, value: object) -> None:
    form, config = form_of("qwen3_next"), {"model_type": "qwen3_next"} | COMPLETE["qwen3_next"]
    changed = {"partial_rotary_factor" if key == "rotary_dim" else key: value}
    changed = value if isinstance(value, dict) else changed
    with pytest.raises(ValueError, match=f"^{key}: |\\b{key} = "):
        form.args(config | changed)


def test_rotary_dims_are_those_of_transformers() -> None:
    """It multiplies the factor by the dims of a head, and rounds down."""
    form = form_of("qwen3_next")
    config = {"model_type": "qwen3_next"} | COMPLETE["qwen3_next"]
    rounded = form.args(config | {"head_dim": 20, "partial_rotary_factor": 0.34})
    assert cast(Qwen3NextArgs, rounded).rotary_dim == 6
    args = form.args(config)
    newer = {key: value for key, value in config.items() if key != "partial_rotary_factor"}
    quarter = form.args(newer | {"rope_parameters": QUARTER})
    assert cast(Qwen3NextArgs, quarter).rotary_dim == 8
    for head_dim in range(2, 260, 2):
        for rotary_dim in range(2, head_dim + 1, 2):
            one = replace(cast(Qwen3NextArgs, args), head_dim=head_dim, rotary_dim=rotary_dim)
            fraction = form.config(one)["partial_rotary_factor"]
            assert int(head_dim * fraction) == rotary_dim
            assert int(fraction * head_dim) == rotary_dim


def test_disabled_sliding_window_is_accepted() -> None:
    off = {"sliding_window": 4096, "use_sliding_window": False, "layer_types": ["full_attention"]}
    assert form_of("llama").args(OLDER | off) == form_of("llama").args(OLDER)
    qwen3 = form_of("qwen3").config(FLAVORS["qwen3-debugmodel"][1])
    assert form_of("qwen3").args(qwen3 | off) == FLAVORS["qwen3-debugmodel"][1]
    with pytest.raises(ValueError, match="use_sliding_window"):
        form_of("qwen3").args(qwen3 | {"use_sliding_window": True})


def test_qwen3_rejects_null_head_dim_and_n_kv_heads() -> None:
    qwen3 = form_of("qwen3").config(FLAVORS["qwen3-debugmodel"][1])
    for key in ("head_dim", "num_key_value_heads"):
        with pytest.raises(ValueError, match=key):
            form_of("qwen3").args(qwen3 | {key: None})


def test_inexpressible_args_have_no_config() -> None:
    with pytest.raises(ValueError, match="qk_norm"):
        form_of("llama").config(FLAVORS["qwen3-debugmodel"][1])


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 61,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-3,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
COMPLETE = {
    "llama": SMALL,
    "qwen3": SMALL,
    "qwen3_moe": SMALL | MOE | {"norm_topk_prob": True},
    "qwen3_next": SMALL | MOE | {
        "shared_expert_intermediate_size": 40,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_conv_kernel_dim": 3,
        "full_attention_interval": 2,
        "partial_rotary_factor": 0.5,
    },
}  # fmt: skip


def completed(config: dict[str, Any]) -> dict[str, Any]:
    """``config`` with the values that transformers adds."""
    # transformers removes entries from its argument, hence the copy.
    completed = transformers.AutoConfig.for_model(**json.loads(json.dumps(config))).to_dict()
    # transformers' attention derives it when the configuration has none.
    derived = completed["hidden_size"] // completed["num_attention_heads"]
    return {"head_dim": derived} | completed


@pytest.mark.parametrize("family", COMPLETE)
def test_absent_keys_have_the_defaults_of_transformers(family: str) -> None:
    form, config = form_of(family), {"model_type": family} | COMPLETE[family]
    assert form.defaults(config) == {}
    assert form.args(config) == form.args(completed(config))
    for key in COMPLETE[family].keys() - {"norm_topk_prob"}:
        without = {k: v for k, v in config.items() if k != key}
        assert form.defaults(without).keys() == {key}
        try:
            want = form.args(completed(without))
        except ValueError as error:
            # transformers' default contradicts the other keys: it is rejected here as well.
            with pytest.raises(ValueError, match=str(error).partition(":")[0]):
                form.args(without)
        else:
            assert form.args(without) == want
    bare = {"model_type": family} | ({"norm_topk_prob": True} if "moe" in family else {})
    assert form.args(bare) == form.args(completed(bare))
    assert form.defaults(bare).keys() == COMPLETE[family].keys() - {"norm_topk_prob"}


FACTORS = {key: value for key, value in LLAMA31.items() if not key.startswith("rope")}


@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_scaling": None},
        {"rope_scaling": {"type": "default"}},
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "default"}},
        {"rope_parameters": {"rope_type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        *({"rope_scaling": FACTORS | kind} | theta
          for kind in ({"rope_type": "llama3"}, {"type": "llama3"},
                       {"type": "llama3", "rope_type": "llama3"})
          for theta in ({}, {"rope_theta": 5e5})),
        {"rope_parameters": FACTORS | {"rope_type": "llama3"}},
    ],
)  # fmt: skip
def test_rotary_keys_of_all_versions_mean_what_transformers_reads(rope: dict[str, Any]) -> None:
    config = {k: v for k, v in OLDER.items() if "rope" not in k} | rope
    args = form_of("llama").args(config)
    assert args == form_of("llama").args(completed(config))
    assert ("rope_theta" in form_of("llama").defaults(config)) == (args.rope_theta == 1e4)


def test_null_means_absent_only_where_transformers_derives_the_value() -> None:
    null = OLDER | {"head_dim": None, "num_key_value_heads": None}
    assert form_of("llama").args(null) == form_of("llama").args(OLDER)
    assert form_of("llama").args(null) == form_of("llama").args(completed(null))
    for key in ("vocab_size", "rms_norm_eps", "num_hidden_layers", "intermediate_size"):
        with pytest.raises(ValueError, match=f"^{key}: absent"):
            form_of("llama").args(OLDER | {key: None})


def test_first_spelling_of_the_architecture_is_read() -> None:
    first = OLDER | {"architectures": ["LLaMAForCausalLM"]}
    assert form_of("llama").args(first) == form_of("llama").args(OLDER)
    for names in ([], ["LlamaForCausalLM"] * 2, "LlamaForCausalLM", 3, [None]):
        with pytest.raises(ValueError, match=r"^architectures: "):
            form_of("llama").args(OLDER | {"architectures": names})
