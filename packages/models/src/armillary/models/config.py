"""The sizes of LLaMA, hybrid and GPT models, with their parameter counts and FLOPs per token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from armillary.attention import AttentionMask
from armillary.core.internal import check_bool, integer, number
from armillary.models.layers.rope import Llama3Scaling, RopeScaling

Mixer = Literal["attention", "delta_rule", "mamba2"]
"""The part of a block that mixes tokens: attention, Gated DeltaNet (arXiv 2412.06464) or Mamba-2 (arXiv 2405.21060)."""


SIZES = ("vocab_size", "dim", "layers", "heads", "kv_heads", "hidden_dim", "head_dim", "max_positions")
# Largest accepted number of parameters, 2^62 bytes in float64. torch fails for 2^63 bytes, even on the meta device.
MAX_PARAMETERS = 2**59


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """The sizes of a LLaMA.

    Args:
        vocab_size: V, rows of the embedding table.
        dim: E, the width of the residual stream.
        layers: number of blocks.
        heads: H, number of query heads.
        kv_heads: K, number of key/value heads; query head h reads key/value head h // (H / K).
        hidden_dim: the width inside the MLP.
        head_dim: D, an even number; 0 means dim // heads.
        norm_eps: epsilon of RMSNorm, added to the mean square.
        rope_theta: the base of the RoPE frequencies.
        max_positions: sequence length of pre-training. It is saved with the weights and does not limit sequences.
        tied_embeddings: True uses the embedding table as the head's weight.
        qk_norm: True applies an RMSNorm over D to queries and keys before RoPE (Qwen3).
        qkv_bias: True gives the projections to queries, keys and values a bias (Qwen2).
        out_bias: True gives attention's output projection a bias.
        mlp_bias: True gives the MLP's projections a bias.
        rope_scaling: changes the RoPE frequencies for longer sequences (LLaMA 3.1, YaRN).
        window: maximum number of keys that a query sees, its own included, if the mask allows more (Mistral).
        window_from: index of the first layer with the window (Qwen2); 0 without a window.
        mixers: layer i has the mixer `mixers[i % len(mixers)]`: `("delta_rule", "delta_rule", "attention")` is a hybrid
            with attention in every third layer.
        states: sizes of the layers with other mixers than attention; needed if there are any.
        latent: sizes of multi-head latent attention (DeepSeek, Youtu-LLM), in all layers. D is `latent.head_dim`.

    Raises:
        ValueError: a size is not an integer of at least 1, key/value heads do not divide query heads, the head dim is
            odd, dim is below heads without a head dim, eps is below 0 or not finite, theta is not above 0 or not
            finite, `window_from` is not a layer (without a window, not 0), a mixer is unknown, there are no mixers or
            more than layers, `states` are missing or not used, there are more than 2^59 parameters, or `latent` comes
            with another head dim, other numbers of heads and key/value heads, qk_norm, a bias, a window or states.
    """

    vocab_size: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden_dim: int
    head_dim: int = 0
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    max_positions: int = 8192
    tied_embeddings: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    rope_scaling: RopeScaling | None = None
    window: int | None = None
    window_from: int = 0
    mixers: tuple[Mixer, ...] = ("attention",)
    states: StateConfig | None = None
    latent: LatentSizes | None = None

    def __post_init__(self) -> None:
        check_sizes(self, [name for name in SIZES if name != "head_dim"])
        if self.latent is not None:
            self._check_latent(self.latent)
        if self.head_dim == 0:
            object.__setattr__(self, "head_dim", self.dim // self.heads)
        if self.head_dim == 0:
            raise ValueError(f"dim={self.dim} must be at least heads={self.heads}, or head_dim be given")
        check_sizes(self, ["head_dim"])
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; RoPE rotates pairs, so it must be even")
        if number("norm_eps", self.norm_eps) < 0 or number("rope_theta", self.rope_theta) <= 0:
            raise ValueError(f"norm_eps={self.norm_eps} must be at least 0 and rope_theta={self.rope_theta} above 0")
        if self.window is not None:
            check_sizes(self, ("window",))
        if not 0 <= integer("window_from", self.window_from) < (1 if self.window is None else self.layers):
            raise ValueError(
                f"window_from={self.window_from} with window={self.window} and layers={self.layers}: "
                "must be the first layer that has the window, or 0"
            )
        object.__setattr__(self, "mixers", tuple(self.mixers))
        if not 1 <= len(self.mixers) <= self.layers or not {*self.mixers} <= {*get_args(Mixer)}:
            raise ValueError(
                f"mixers={self.mixers}: 1 to layers={self.layers} of {', '.join(get_args(Mixer))} are accepted"
            )
        if ({*self.mixers} != {"attention"}) != (self.states is not None):
            raise ValueError(
                f"mixers={self.mixers} with states={self.states}: states are the sizes of mixers other than attention"
            )
        check_parameters(self)

    def _check_latent(self, latent: LatentSizes) -> None:
        """Sets the head dim, and raises ValueError for options that multi-head latent attention does not have."""
        if self.head_dim == 0:
            object.__setattr__(self, "head_dim", latent.head_dim)
        if self.kv_heads != self.heads:
            raise ValueError(f"kv_heads={self.kv_heads} must be heads={self.heads} with latent={latent}")
        accepted = {"head_dim": latent.head_dim, "window": None, "states": None}
        accepted |= dict.fromkeys(("qk_norm", "qkv_bias", "out_bias", "mlp_bias"), False)
        for name, value in accepted.items():
            if getattr(self, name) != value:
                raise ValueError(f"{name}={getattr(self, name)} with latent={latent}: it must be {value}")

    @classmethod
    def llama3_8b(cls) -> LlamaConfig:
        """LLaMA-3-8B: 8,030,261,248 parameters."""
        return cls(vocab_size=128_256, dim=4096, layers=32, heads=32, kv_heads=8, hidden_dim=14_336)

    @classmethod
    def llama31_8b(cls) -> LlamaConfig:
        """LLaMA-3.1-8B: LLaMA-3-8B's sizes, for 131,072 tokens."""
        scaling = Llama3Scaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
        )
        return replace(cls.llama3_8b(), rope_scaling=scaling, max_positions=131_072)

    @classmethod
    def llama3_70b(cls) -> LlamaConfig:
        """LLaMA-3-70B: 70,553,706,496 parameters."""
        return cls(vocab_size=128_256, dim=8192, layers=80, heads=64, kv_heads=8, hidden_dim=28_672)

    @classmethod
    def llama2_7b(cls) -> LlamaConfig:
        """LLaMA-2-7B: 6,738,415,616 parameters."""
        return cls(
            vocab_size=32_000,
            dim=4096,
            layers=32,
            heads=32,
            kv_heads=32,
            hidden_dim=11_008,
            rope_theta=10_000.0,
            max_positions=4096,
        )

    @classmethod
    def mistral_7b(cls) -> LlamaConfig:
        """Mistral-7B-v0.1 (arXiv 2310.06825), with its window of 4096 keys: 7,241,732,096 parameters."""
        return cls(
            vocab_size=32_000,
            dim=4096,
            layers=32,
            heads=32,
            kv_heads=8,
            hidden_dim=14_336,
            rope_theta=10_000.0,
            max_positions=32_768,
            window=4096,
        )

    @classmethod
    def qwen3_32b(cls) -> LlamaConfig:
        """Qwen3-32B: 32,762,123,264 parameters."""
        return cls(
            vocab_size=151_936,
            dim=5120,
            layers=64,
            heads=64,
            kv_heads=8,
            hidden_dim=25_600,
            head_dim=128,
            norm_eps=1e-6,
            rope_theta=1_000_000.0,
            max_positions=40_960,
            qk_norm=True,
        )

    @classmethod
    def youtu_2b(cls) -> LlamaConfig:
        """Youtu-LLM-2B (arXiv 2512.24618), with multi-head latent attention: 1,961,560,064 parameters."""
        return cls(
            vocab_size=128_256,
            dim=2048,
            layers=32,
            heads=16,
            kv_heads=16,
            hidden_dim=6144,
            norm_eps=1e-6,
            rope_theta=1_600_000.0,
            max_positions=131_072,
            tied_embeddings=True,
            latent=LatentSizes(rank=512, query_rank=1536, rotary_dim=64, key_dim=128, value_dim=128),
        )

    @classmethod
    def debug(cls) -> LlamaConfig:
        """A small model for tests and laptops: 804,224 parameters; its vocabulary is the bytes and one separator."""
        return cls(vocab_size=257, dim=128, layers=4, heads=8, kv_heads=4, hidden_dim=352, rope_theta=10_000.0)

    @property
    def value_dim(self) -> int:
        """Dv."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def rotary_dim(self) -> int:
        """Dims of a query head that RoPE rotates."""
        return self.head_dim if self.latent is None else self.latent.rotary_dim

    def window_of(self, layer: int) -> int | None:
        """Returns the window of a layer: the maximum number of keys that a query sees."""
        return self.window if layer >= self.window_from else None

    def mixer_of(self, layer: int) -> Mixer:
        """Returns the mixer of that layer."""
        return self.mixers[layer % len(self.mixers)]

    def mixer_counts(self) -> dict[Mixer, int]:
        """Returns the number of layers with each mixer."""
        # Without a loop over layers, because a config file may state any number of layers.
        repeats, remainder = divmod(self.layers, len(self.mixers))
        last_counts = Counter(self.mixers[:remainder])  # of the layers after the last full repeat
        return {mixer: repeats * count + last_counts[mixer] for mixer, count in Counter(self.mixers).items()}

    def parameters(self) -> int:
        """Number of trained parameters: blocks, final norm, embedding table and, unless tied, head."""
        blocks = sum(count * self.block_parameters(mixer) for mixer, count in self.mixer_counts().items())
        tables = 1 if self.tied_embeddings else 2  # embedding table and head, V E each
        return blocks + self.dim + tables * self.vocab_size * self.dim

    def block_parameters(self, mixer: Mixer) -> int:
        """Number of parameters of a block with this mixer."""
        norms = 2 * self.dim  # before the mixer and before the MLP
        # SwiGLU: gate, up and down projection, with `mlp_bias` each with a bias.
        mlp = 3 * self.dim * self.hidden_dim + (2 * self.hidden_dim + self.dim if self.mlp_bias else 0)
        if mixer != "attention" and self.states is not None:
            return self.states.parameters(mixer, self.dim) + mlp + norms
        if self.latent is not None:
            return self.latent.parameters(self.dim, self.heads) + mlp + norms
        # Weights: E H D each for queries and output, E K D each for keys and values.
        attention = self.dim * self.head_dim * 2 * (self.heads + self.kv_heads)
        attention += 2 * self.head_dim if self.qk_norm else 0
        attention += self.head_dim * (self.heads + 2 * self.kv_heads) if self.qkv_bias else 0
        attention += self.dim if self.out_bias else 0
        return attention + mlp + norms

    def flops_per_token(self, length: int, mask: AttentionMask | None = None) -> float:
        """Average floating-point operations, forward and backward, per token of a sequence of `length` tokens.

        These are the usual model FLOPs of an MFU. Each parameter that multiplies the token counts 6 (2 forward, 4
        backward). The embedding table is looked up and does not count, unless it is tied to the head; biases and norms
        count as if they multiplied. Attention adds 6 H (D + Dv) in each layer for every key that the token sees under
        `mask` (causal by default) and the layer's window; layers with a state add `StateConfig.flops_per_token`.
        Softmax, RoPE and recomputation do not count; latents are expanded once.

        Raises:
            ValueError: `length` is below 1, or the documents of `mask` do not end there.
        """
        lookup_parameters = 0 if self.tied_embeddings else self.vocab_size * self.dim
        windows = (self.window_of(layer) for layer in range(self.layers) if self.mixer_of(layer) == "attention")
        # Q K^T and P V: 2 FLOPs in forward, twice as much in backward: 6 per visible key, head and dim, D and Dv.
        key_elements = visible_keys(length, mask, windows) * self.heads * (self.head_dim + self.value_dim)
        state_flops = 0
        if self.states is not None:
            state_flops = sum(n * self.states.flops_per_token(mixer) for mixer, n in self.mixer_counts().items())
        return 6 * (self.parameters() - lookup_parameters + key_elements) + state_flops


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The sizes of a GPT-2.

    Args:
        vocab_size: V, rows of the embedding table, which is also the head's weight.
        dim: E, the width of the residual stream. The width inside the MLP is 4 E.
        layers: number of blocks.
        heads: H, the number of query heads and also of key/value heads.
        max_positions: number of learned positions, which is the maximum sequence length.
        norm_eps: epsilon of LayerNorm, added to the variance.

    Raises:
        ValueError: a size is not an integer of at least 1, heads do not divide dim, eps is below 0 or not finite, or
            there are more than 2^59 parameters.
    """

    vocab_size: int = 50_257
    dim: int
    layers: int
    heads: int
    max_positions: int = 1024
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        check_sizes(self, ("vocab_size", "dim", "layers", "heads", "max_positions"))
        if self.dim % self.heads:
            raise ValueError(f"dim={self.dim} is not a multiple of heads={self.heads}")
        if number("norm_eps", self.norm_eps) < 0:
            raise ValueError(f"norm_eps={self.norm_eps} must be at least 0")
        check_parameters(self)

    @classmethod
    def gpt2(cls) -> GPTConfig:
        """GPT-2, the smallest: 124,439,808 parameters."""
        return cls(dim=768, layers=12, heads=12)

    @classmethod
    def gpt2_medium(cls) -> GPTConfig:
        """GPT-2 medium: 354,823,168 parameters."""
        return cls(dim=1024, layers=24, heads=16)

    @classmethod
    def gpt2_large(cls) -> GPTConfig:
        """GPT-2 large: 774,030,080 parameters."""
        return cls(dim=1280, layers=36, heads=20)

    @classmethod
    def gpt2_xl(cls) -> GPTConfig:
        """GPT-2 XL: 1,557,611,200 parameters."""
        return cls(dim=1600, layers=48, heads=25)

    @classmethod
    def wallfacer_3b(cls, max_positions: int = 1024) -> GPTConfig:
        """The "3B" GPT of the WallFacer paper (arXiv 2407.00611, section 5): 12 layers, 16 heads, E = 4096."""
        return cls(dim=4096, layers=12, heads=16, max_positions=max_positions)

    @classmethod
    def wallfacer_7b(cls, max_positions: int = 1024) -> GPTConfig:
        """The "7B" GPT of the WallFacer paper (arXiv 2407.00611, section 5): 32 layers, 32 heads, E = 4096."""
        return cls(dim=4096, layers=32, heads=32, max_positions=max_positions)

    @property
    def kv_heads(self) -> int:
        """K, equal to H."""
        return self.heads

    @property
    def head_dim(self) -> int:
        """D."""
        return self.dim // self.heads

    @property
    def value_dim(self) -> int:
        """Dv, equal to D."""
        return self.head_dim

    def parameters(self) -> int:
        """Number of trained parameters: blocks, final norm, embedding table and positions."""
        # Attention (q, k, v and output): 4 E^2 weights, 4 E biases. MLP: 8 E^2 and 5 E. Two LayerNorms: 4 E.
        block = 12 * self.dim**2 + 13 * self.dim
        final_norm = 2 * self.dim
        return self.layers * block + final_norm + (self.vocab_size + self.max_positions) * self.dim

    def flops_per_token(self, length: int, mask: AttentionMask | None = None) -> float:
        """See `LlamaConfig.flops_per_token`. Learned positions are looked up; other parameters multiply."""
        multiplying_parameters = self.parameters() - self.max_positions * self.dim
        return 6 * multiplying_parameters + 12 * visible_keys(length, mask, [None] * self.layers) * self.dim


@dataclass(frozen=True, kw_only=True)
class LatentSizes:
    """The sizes of multi-head latent attention, MLA (arXiv 2405.04434).

    Args:
        rank: L, numbers of the latent from which a token's keys and values are made.
        query_rank: numbers of the latent of queries; None projects to queries directly.
        rotary_dim: Dr, dims of queries and keys with positions; even. The rotary key is the same for all heads.
        key_dim: D - Dr, dims of queries and keys without positions.
        value_dim: Dv.
        interleaved: RoPE rotates dims 2i and 2i + 1, as in DeepSeek's and Youtu-LLM's weights, not i and i + Dr / 2.

    Raises:
        ValueError: a size is not an integer of at least 1, or `rotary_dim` is odd.
    """

    rank: int
    rotary_dim: int
    key_dim: int
    value_dim: int
    query_rank: int | None = None
    interleaved: bool = True

    def __post_init__(self) -> None:
        check_sizes(self, ["rank", "rotary_dim", "key_dim", "value_dim"])
        if self.query_rank is not None:
            check_sizes(self, ["query_rank"])
        check_bool("interleaved", self.interleaved)
        if self.rotary_dim % 2:
            raise ValueError(f"rotary_dim={self.rotary_dim} is odd; RoPE rotates pairs, so it must be even")

    @property
    def head_dim(self) -> int:
        """D."""
        return self.key_dim + self.rotary_dim

    @property
    def sent(self) -> int:
        """Numbers that travel for a token: Dr + L."""
        return self.rotary_dim + self.rank

    @property
    def key_parameters(self) -> int:
        """Parameters that expand latents to the key and the value of one head: (D - Dr + Dv) L."""
        return (self.key_dim + self.value_dim) * self.rank

    def shared_parameters(self, dim: int) -> int:
        """Parameters that no head has of its own: projections to latents and rotary keys, and the latents' norms."""
        query_rank = self.query_rank or 0
        return dim * (query_rank + self.sent) + query_rank + self.rank

    def parameters(self, dim: int, heads: int) -> int:
        """Number of parameters of attention with H heads on a residual stream of width `dim`."""
        # Of a head: its query, the expansion of its key and value, and its part of the output projection.
        of_head = (self.query_rank or dim) * self.head_dim + self.key_parameters + self.value_dim * dim
        return self.shared_parameters(dim) + heads * of_head


@dataclass(frozen=True, kw_only=True)
class StateConfig:
    """The sizes of layers with a state.

    Args:
        heads: H, number of value heads. Each has its own state [Dk, Dv].
        key_heads: K, number of heads of queries and keys (in Mamba-2, groups of B and C). Value head h uses key head
            h // (H / K).
        key_dim: Dk, channels of a key head (in Mamba-2, the state size Ns).
        value_dim: Dv, channels of a value head (in Mamba-2, the head dim D).
        conv_width: W, the number of tokens that the short convolution sees.

    Raises:
        ValueError: a size is not an integer of at least 1, or key heads do not divide value heads.
    """

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    conv_width: int = 4

    def __post_init__(self) -> None:
        check_sizes(self, ("heads", "key_heads", "key_dim", "value_dim", "conv_width"))
        if self.heads % self.key_heads:
            raise ValueError(f"states.key_heads {self.key_heads} must divide states.heads {self.heads}")

    @property
    def keys(self) -> int:
        """Channels of all key heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Channels of all value heads."""
        return self.heads * self.value_dim

    def parameters(self, mixer: Mixer, dim: int) -> int:
        """Number of parameters of a mixer with a state (`StateMixer`) on a residual stream of width `dim`."""
        channels = 2 * self.keys + self.values  # of q, k and v
        projections = dim * (channels + 2 * self.values + self.heads)  # to q, k, v; z and o; a
        shared = projections + channels * self.conv_width + 2 * self.heads  # convolutions; A_log and dt_bias
        if mixer == "delta_rule":
            return shared + dim * self.heads + self.value_dim  # projection to b; norm
        return shared + channels + self.heads + self.values  # biases of the convolutions; D; norm

    def flops_per_token(self, mixer: Mixer) -> int:
        """Floating-point operations of the recurrence per token, forward and backward.

        Per token and head, the query reads the state once and the state is updated once, 2 Dk Dv operations each. The
        delta rule also reads the state by the key, another 2 Dk Dv. Backward counts twice as much as forward.
        """
        forward_flops = {"attention": 0, "mamba2": 4, "delta_rule": 6}[mixer]  # per element of a state
        return 3 * forward_flops * self.heads * self.key_dim * self.value_dim


def visible_keys(length: int, mask: AttentionMask | None, windows: Iterable[int | None]) -> float:
    """Returns the number of keys that a query sees: the mean over queries and rows, summed over layers' windows."""
    integer("length", length, 1)
    mask = AttentionMask(causal=True) if mask is None else mask
    rows = mask.batch or 1
    layer_counts = Counter(windows)  # layers with the same window have the same pairs, which are counted once
    pairs = 0
    for window, count in layer_counts.items():
        layer_mask = mask.narrow(None if window is None else window - 1)  # a window includes the query's own key
        pairs += count * sum(layer_mask.pairs(length, row) for row in range(rows))
    return pairs / (length * rows)


def one_block(config: LlamaConfig | GPTConfig, mixer: Mixer | None = None) -> LlamaConfig | GPTConfig:
    """Returns the config of the same model with only one block. The block has a window only if all layers have it.

    Args:
        mixer: the block's mixer; by default attention, or `mixers[0]` if the model has no attention.
    """
    if isinstance(config, LlamaConfig):
        if mixer is None:
            mixer = "attention" if "attention" in config.mixers else config.mixers[0]
        return replace(
            config,
            layers=1,
            window=None if config.window_from else config.window,
            window_from=0,
            mixers=(mixer,),
            states=None if mixer == "attention" else config.states,
        )
    return replace(config, layers=1)


def check_sizes(config: object, names: Sequence[str]) -> None:
    """Raises ValueError for sizes that are not whole numbers of at least 1."""
    for name in names:
        size = getattr(config, name)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name}={size!r}: it must be a whole number of at least 1")


def check_parameters(config: LlamaConfig | GPTConfig) -> None:
    """Raises ValueError for a model of more than `MAX_PARAMETERS` parameters."""
    if config.parameters() > MAX_PARAMETERS:
        sizes = {name: getattr(config, name, None) for name in (*SIZES, "latent")}
        text = ", ".join(f"{name}={value}" for name, value in sizes.items() if value is not None)
        raise ValueError(f"{text}: {config.parameters()} parameters; at most 2^59 are supported")
