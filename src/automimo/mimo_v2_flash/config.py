"""MiMoV2FlashConfig and MiMoV2Config: the shape of a MiMo-V2 model.

The attributes are one vocabulary; files have two (the released one and the one transformers writes). What a file may
say and how the two are reconciled is in `config_files.py`; the constructors here only derive and check.
"""

from __future__ import annotations

from copy import deepcopy
from inspect import signature
from typing import TYPE_CHECKING, Any, ClassVar

from transformers import PretrainedConfig

from automimo.errors import ConfigError
from automimo.mimo_v2_flash.config_files import check_values, constructor_arguments, serialised

if TYPE_CHECKING:
    import torch

LAYOUTS = ("split", "fused_qkv")
DTYPES = ("bfloat16", "float16", "float32", "float64")
# Made by the constructor from other keys; changing one alone would leave the two at odds.
DERIVED_KEYS = ("layer_types", "mlp_layer_types", "rope_parameters")
# (i + 1) % 6 == 0 is the published spacing of the full layers of V2-Flash.
FULL_LAYER_PERIOD = 6


class MiMoV2FlashConfig(PretrainedConfig):
    """Configuration of MiMo-V2-Flash (model type ``mimo_v2_flash``).

    Sizes are in elements, `rope_theta` and `swa_rope_theta` are rotary bases of full and sliding layers,
    `sliding_window` is the number of keys a query of a sliding layer sees, itself included (the model reads nothing
    else about the window). `hybrid_layer_pattern` has 1 for a sliding and 0 for a full layer; without it,
    `hybrid_block_size` b makes layer i full where (i + 1) % b == 0, and without both layer 0 and every sixth layer are
    full. `moe_layer_freq` has 1 for an MoE and 0 for a dense layer; an integer n > 0 makes layer i MoE where
    i % n == 0, and 0 makes all dense; without it only layer 0 is dense.

    Derived attributes: `layer_types` and `mlp_layer_types` (transformers' words for the two patterns),
    `rope_parameters` (one entry per layer kind), `rms_norm_eps` (equals `layernorm_epsilon`),
    `routed_scaling_factor` (None means 1.0).

    Raises ConfigError (a ValueError) for values that no MiMo-V2 model can have; the message names key and value.
    """

    if TYPE_CHECKING:
        dtype: torch.dtype  # of the weights; the base class also allows a name and None

    model_type = "mimo_v2_flash"
    attribute_map: ClassVar[dict[str, str]] = {"num_local_experts": "n_routed_experts"}
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    def __init__(  # noqa: PLR0915 - one assignment per key of the fixed interface
        self,
        vocab_size: int = 152576,
        hidden_size: int = 4096,
        intermediate_size: int = 16384,
        moe_intermediate_size: int = 2048,
        num_hidden_layers: int = 48,
        num_attention_heads: int = 64,
        num_key_value_heads: int = 4,
        head_dim: int = 192,
        v_head_dim: int = 128,
        swa_num_attention_heads: int = 64,
        swa_num_key_value_heads: int = 8,
        swa_head_dim: int = 192,
        swa_v_head_dim: int = 128,
        hidden_act: str = "silu",
        max_position_embeddings: int = 262144,
        initializer_range: float = 0.02,
        layernorm_epsilon: float = 1e-5,
        rms_norm_eps: float | None = None,
        use_cache: bool = True,
        tie_word_embeddings: bool = False,
        rope_theta: float = 5000000.0,
        swa_rope_theta: float = 10000.0,
        rope_scaling: dict | None = None,
        attention_bias: bool = False,
        attention_dropout: float = 0.0,
        attention_projection_layout: str = "split",
        attention_value_scale: float | None = 0.707,
        add_full_attention_sink_bias: bool = False,
        add_swa_attention_sink_bias: bool = True,
        hybrid_block_size: int | None = None,
        hybrid_layer_pattern: list[int] | None = None,
        partial_rotary_factor: float = 0.334,
        sliding_window: int | None = 128,
        sliding_window_size: int | None = 128,
        attention_chunk_size: int | None = 128,
        n_routed_experts: int | None = 256,
        n_shared_experts: int | None = None,
        num_experts_per_tok: int = 8,
        scoring_func: str = "sigmoid",
        topk_method: str = "noaux_tc",
        n_group: int = 1,
        topk_group: int = 1,
        norm_topk_prob: bool = True,
        routed_scaling_factor: float | None = 1.0,
        apply_router_weight_after_down: bool = False,
        moe_layer_freq: list[int] | None = None,
        torch_dtype: str = "bfloat16",
        vision_config: dict | None = None,
        audio_config: dict | None = None,
        processor_config: dict | None = None,
        **kwargs: Any,
    ) -> None:
        check_values({**locals(), **kwargs})  # first, so that locals() is the arguments and nothing else
        if attention_projection_layout not in LAYOUTS:
            raise ConfigError(
                "attention_projection_layout must be either 'split' or 'fused_qkv', "
                f"got {attention_projection_layout!r}"
            )
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.moe_intermediate_size = moe_intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_attention_heads if num_key_value_heads is None else num_key_value_heads
        self.head_dim = head_dim
        self.v_head_dim = v_head_dim
        self.swa_num_attention_heads = swa_num_attention_heads
        self.swa_num_key_value_heads = (
            swa_num_attention_heads if swa_num_key_value_heads is None else swa_num_key_value_heads
        )
        self.swa_head_dim = swa_head_dim
        self.swa_v_head_dim = swa_v_head_dim
        self.hidden_act = hidden_act
        self.max_position_embeddings = max_position_embeddings
        self.initializer_range = initializer_range
        # One epsilon under two names; rms_norm_eps, when given, is the more explicit of the two.
        self.rms_norm_eps = layernorm_epsilon if rms_norm_eps is None else rms_norm_eps
        self.layernorm_epsilon = self.rms_norm_eps
        self.use_cache = use_cache
        self.rope_theta = float(rope_theta)
        self.swa_rope_theta = float(rope_theta if swa_rope_theta is None else swa_rope_theta)
        self.attention_bias = attention_bias
        self.attention_dropout = attention_dropout
        self.attention_projection_layout = attention_projection_layout
        self.attention_value_scale = attention_value_scale
        self.add_full_attention_sink_bias = add_full_attention_sink_bias
        self.add_swa_attention_sink_bias = add_swa_attention_sink_bias
        self.hybrid_block_size = hybrid_block_size
        self.hybrid_layer_pattern = _layer_pattern(num_hidden_layers, hybrid_layer_pattern, hybrid_block_size)
        self.partial_rotary_factor = partial_rotary_factor
        self.sliding_window = sliding_window
        self.sliding_window_size = sliding_window_size
        self.attention_chunk_size = attention_chunk_size
        self.n_routed_experts = n_routed_experts
        self.n_shared_experts = n_shared_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.scoring_func = scoring_func
        self.topk_method = topk_method
        self.n_group = n_group
        self.topk_group = topk_group
        self.norm_topk_prob = norm_topk_prob
        self.routed_scaling_factor = 1.0 if routed_scaling_factor is None else routed_scaling_factor
        self.apply_router_weight_after_down = apply_router_weight_after_down
        self.moe_layer_freq = _moe_pattern(num_hidden_layers, moe_layer_freq)
        self.vision_config = vision_config
        self.audio_config = audio_config
        self.processor_config = processor_config
        self.checkpoint_tp_size = kwargs.pop("checkpoint_tp_size", None)

        pattern = self.hybrid_layer_pattern[:num_hidden_layers]
        self.layer_types = ["sliding_attention" if sliding else "full_attention" for sliding in pattern]
        moe = self.moe_layer_freq[:num_hidden_layers]
        self.mlp_layer_types = ["sparse" if sparse else "dense" for sparse in moe]
        given_rope = kwargs.pop("rope_parameters", None)
        self.rope_parameters = {
            "full_attention": self._rope_entry(self.rope_theta),
            "sliding_attention": self._rope_entry(self.swa_rope_theta),
        }
        if given_rope is not None and given_rope != self.rope_parameters:
            raise ConfigError(
                f"rope_parameters: {given_rope} disagrees with rope_theta {self.rope_theta}, swa_rope_theta "
                f"{self.swa_rope_theta} and partial_rotary_factor {partial_rotary_factor}; pass only one of them"
            )
        # Set by from_dict: which optional keys the file had, so that saving writes them again and nothing more.
        self._file_keys: dict[str, Any] = {}
        _check(self, rope_scaling, tie_word_embeddings)
        dtype = kwargs.pop("dtype", None)
        self.tie_word_embeddings = tie_word_embeddings
        super().__init__(dtype=dtype_name(torch_dtype if dtype is None else dtype), **kwargs)

    # transformers turns every config class into a dataclass, whose generated comparison would see none of our keys.
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MiMoV2FlashConfig) or type(self) is not type(other):
            return False
        elsewhere = {"_name_or_path": None}  # the folder a config was read from is no part of what it says
        return bool({**self.to_dict(), **elsewhere} == {**other.to_dict(), **elsewhere})

    __hash__ = None  # type: ignore[assignment]

    def _rope_entry(self, theta: float) -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": self.partial_rotary_factor}

    def convert_rope_params_to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Overrides transformers' own reading of flat rotary keys: the constructor has done it."""
        return kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build from the contents of a config.json in either vocabulary.

        `kwargs` that are constructor keywords replace what the file says, before anything is derived from it.
        Raises ConfigError where two keys of the file contradict each other.
        """
        arguments, file_keys = constructor_arguments(deepcopy(config_dict), cls.model_type)
        derived = [key for key in DERIVED_KEYS if key in kwargs]
        if derived:
            raise ConfigError(f"{derived[0]} is derived from other keys and cannot be replaced by itself; pass those")
        for key in [key for key in kwargs if key in CONSTRUCTOR_KEYS]:
            value = kwargs.pop(key)
            if key not in ("dtype", "torch_dtype"):
                arguments[key] = value
                if key in file_keys:
                    file_keys[key] = value
            elif value != "auto":  # transformers' word for "as the file says"
                arguments["dtype"] = value
        result = super().from_dict(arguments, **kwargs)
        config = result[0] if isinstance(result, tuple) else result
        config._file_keys = file_keys
        return result

    def to_dict(self) -> dict[str, Any]:
        """Everything a released reader or transformers needs, as JSON-ready values."""
        return serialised(super().to_dict(), self._file_keys, self.sliding_window)

    def to_diff_dict(self) -> dict[str, Any]:
        """What is written to config.json: `to_dict` without transformers' own unchanged defaults.

        Our own keys are written even at their default, since readers' defaults differ from each other. The folder that
        the config was read from is left out: it says nothing about the model, and something about the machine.
        """
        generic = PretrainedConfig().to_dict()
        always = {"transformers_version", "model_type", "tie_word_embeddings"}
        absent = {"vision_config", "audio_config", "processor_config"}
        return {
            key: value
            for key, value in self.to_dict().items()
            if key in always
            or not (
                key == "_name_or_path"
                or (key in generic and generic[key] == value)
                or (key in absent and value is None)
            )
        }


CONSTRUCTOR_KEYS = (
    frozenset(signature(MiMoV2FlashConfig.__init__).parameters) - {"self", "kwargs"}
    # Looked at in the constructor's **kwargs.
    | {"dtype", "checkpoint_tp_size", "quantization_config"}
)


class MiMoV2Config(MiMoV2FlashConfig):
    """Configuration of MiMo-V2.5 and MiMo-V2.6 (model type ``mimo_v2``).

    Takes the keywords of MiMoV2FlashConfig. Where they are absent, `attention_projection_layout` is ``fused_qkv`` and
    `apply_router_weight_after_down` is True.
    """

    model_type = "mimo_v2"

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("attention_projection_layout", "fused_qkv")
        kwargs.setdefault("apply_router_weight_after_down", True)
        super().__init__(**kwargs)

    __eq__ = MiMoV2FlashConfig.__eq__
    __hash__ = None


def dtype_name(dtype: object) -> str:
    """The torch name of a dtype given as that name or as a `torch.dtype`; ConfigError unless weights can have it."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"dtype: {name!r} is none that weights are kept in; choose one of: {', '.join(DTYPES)}")
    return name


def _layer_pattern(num_layers: int, pattern: list[int] | None, block_size: int | None) -> list[int]:
    if pattern is not None:
        if len(pattern) < num_layers:
            raise ConfigError(
                f"hybrid_layer_pattern has {len(pattern)} entries for num_hidden_layers {num_layers}; "
                "give one per layer"
            )
        if set(pattern) - {0, 1}:
            raise ConfigError(f"hybrid_layer_pattern: entries are 0 (full) or 1 (sliding), got {sorted(set(pattern))}")
        return list(pattern)
    if block_size is not None:
        if block_size < 1:
            raise ConfigError(f"hybrid_block_size: must be at least 1, got {block_size}")
        return [0 if (i + 1) % block_size == 0 else 1 for i in range(num_layers)]
    return [0 if i == 0 or (i + 1) % FULL_LAYER_PERIOD == 0 else 1 for i in range(num_layers)]


def _moe_pattern(num_layers: int, freq: list[int] | int | None) -> list[int]:
    if freq is None:
        return [0 if i == 0 else 1 for i in range(num_layers)]
    if isinstance(freq, int):
        if freq < 0:
            raise ConfigError(f"moe_layer_freq: a period must be 0 (all dense) or more, got {freq}")
        return [int(freq > 0 and i % freq == 0) for i in range(num_layers)]
    if len(freq) < num_layers:
        raise ConfigError(f"moe_layer_freq has {len(freq)} entries for num_hidden_layers {num_layers}")
    if set(freq) - {0, 1}:
        raise ConfigError(f"moe_layer_freq: entries are 0 (dense) or 1 (MoE), got {sorted(set(freq))}")
    return list(freq)


def _check(config: MiMoV2FlashConfig, rope_scaling: dict | None, tie_word_embeddings: bool) -> None:
    """Refuse what no MiMo-V2 model has, so that nothing is silently computed in another way."""
    if rope_scaling and (
        set(rope_scaling) - {"type", "rope_type"} or any(value != "default" for value in rope_scaling.values())
    ):
        raise ConfigError(
            f"rope_scaling: MiMo-V2 uses plain rotary embeddings (rope_type 'default'), got {rope_scaling}"
        )
    if tie_word_embeddings:
        raise ConfigError("tie_word_embeddings: MiMo-V2 stores an untied lm_head; set it to false")
    if config.hidden_act != "silu":
        raise ConfigError(f"hidden_act: MiMo-V2 uses 'silu', got {config.hidden_act!r}")
    if config.attention_dropout:
        raise ConfigError(f"attention_dropout: MiMo-V2 has none, got {config.attention_dropout}; set it to 0.0")
    tp_size = config.checkpoint_tp_size
    if tp_size is not None and tp_size < 1:
        raise ConfigError(f"checkpoint_tp_size must be positive, got {tp_size}; give a whole number of at least 1")
    if config.topk_method != "noaux_tc":
        raise ConfigError(f"topk_method: MiMo-V2 routes with 'noaux_tc', got {config.topk_method!r}")
    if 1 in config.hybrid_layer_pattern and (config.sliding_window is None or config.sliding_window < 1):
        raise ConfigError(
            f"sliding_window: the config has sliding layers, so it must be >= 1, got {config.sliding_window}"
        )
    heads = (
        ("num_attention_heads", config.num_attention_heads, "num_key_value_heads", config.num_key_value_heads),
        (
            "swa_num_attention_heads",
            config.swa_num_attention_heads,
            "swa_num_key_value_heads",
            config.swa_num_key_value_heads,
        ),
    )
    for query_name, query, kv_name, kv in heads:
        if kv < 1 or query % kv:
            raise ConfigError(f"{query_name} {query} is not a multiple of {kv_name} {kv}")
