"""What a KV connector is, and the handoff that passes through it. Knows no connector by name."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from sidecar.exchange.splice import replaced


class EngineFacts(msgspec.Struct, frozen=True):
    """What is known of an engine's KV cache, from its metrics or its NIXL metadata; 0 means unknown."""

    block_size: int = 0
    """Tokens per block."""
    num_blocks: int = 0
    engine_id: str = ""
    ranks: int = 0
    """Data-parallel ranks behind one HTTP port."""


class Channel(StrEnum):
    """What the engines settle a transfer on."""

    NONE = "none"
    """Nothing crosses: both know the same store."""
    NIXL = "nixl"
    """The NIXL connectors' side channel; the prefill answer says where it is."""
    P2P = "p2p"
    """The control channel of the offloading connector's P2P tier, at a port that is known beforehand."""
    MOONCAKE = "mooncake"
    """Mooncake's bootstrap server, likewise; it knows the engine of each rank."""


class Source(msgspec.Struct, frozen=True):
    """The prefill endpoint that an answer came from, as far as a handoff must agree with it."""

    hosts: frozenset[str]
    """The endpoint's host as configured and the IP address that really answered, canonical."""
    facts: EngineFacts = EngineFacts()
    fallback_block_size: int = 0
    """The local engine's block size: pairs that differ are rare, and a guess is better than none."""
    transfer_id: str = ""
    """What the prefill leg was told to call this transfer."""
    channel_host: str = ""
    channel_port: int = 0
    """Where the prefill engine's control channel is, for connectors whose answers do not say it."""
    rank: int = 0
    """The data-parallel rank that the prefill leg went to."""


class Handoff(msgspec.Struct, frozen=True):
    """A checked handoff. Single use: once a decode leg carried it, it is dead.

    `params` are the prefill engine's bytes, unchanged.
    """

    params: bytes
    prompt_tokens: int
    engine_id: str = ""
    host: str = ""
    port: int = 0
    tp_size: int = 1
    pp_size: int = 1
    blocks: int = 0
    """Blocks of the prompt; 0: it fills none, there is nothing to pull, and asking for it kills the engine."""
    highest_block: int = -1
    """-1 if there is none, or if all have been compared with what is known of the engine."""
    rank: int = 0
    """The prefill engine's data-parallel rank, where decode has to name it."""
    cached_tokens: int | None = None
    """Prompt tokens that the prefill engine took from its cache, if the decode engine will not say so itself."""
    token_ids: bytes = b""
    """The prompt as the prefill engine tokenised it, a JSON array that decode takes in place of its text; b"" if it
    is to tokenise by itself."""
    prefill_cached_tokens: int = 0
    """Prompt tokens that the prefill engine took from its cache, as far as it says."""

    @property
    def empty(self) -> bool:
        return not self.blocks

    def via(self, host: str, port: int) -> "Handoff":
        """The same handoff with another address for the handshake. Only those two values change."""
        new = {"remote_host": msgspec.json.encode(host), "remote_port": msgspec.json.encode(port)}
        return msgspec.structs.replace(self, params=replaced(self.params, new))

    def with_token_ids(self) -> bytes:
        """`params` with the prompt's token ids, where there are any."""
        if not self.token_ids:
            return self.params
        brace = self.params.index(b"{") + 1
        return b'%b"prompt_token_ids":%b,%b' % (self.params[:brace], self.token_ids, self.params[brace:])


class Rejection(msgspec.Struct, frozen=True):
    """Why a prefill answer's handoff is not passed on. `fault` is one of the failure table's at stage handoff."""

    fault: str
    detail: str


NO_BLOCK_SIZE = Rejection("unverifiable", "the block size is unknown: neither engine's /metrics tells it")


class PrefillUsage(msgspec.Struct, frozen=True):
    """Token counts of a prefill answer, over all APIs."""

    prompt_tokens: int | None = None
    input_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    prompt_tokens_details: dict[str, msgspec.Raw] | None = None
    input_tokens_details: dict[str, msgspec.Raw] | None = None

    @property
    def total(self) -> int:
        """Prompt tokens; /v1/messages counts cached ones apart (anthropic/serving.py of vLLM 0.32)."""
        if self.prompt_tokens:
            return self.prompt_tokens
        parts = (self.input_tokens, self.cache_read_input_tokens, self.cache_creation_input_tokens)
        return sum(part or 0 for part in parts)

    @property
    def cached(self) -> int | None:
        """Prompt tokens from the prefill engine's cache, or None if the answer does not say."""
        details = self.prompt_tokens_details or self.input_tokens_details
        raw = details.get("cached_tokens") if details else None
        if raw is None:
            return self.cache_read_input_tokens
        try:
            return msgspec.json.decode(raw, type=int)
        except msgspec.MsgspecError:
            return None


class PrefillAnswer(msgspec.Struct, frozen=True):
    """The part of a prefill answer that we read."""

    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"")
    """Empty if the answer holds none (a `Raw | None` would not stay raw)."""
    usage: PrefillUsage | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw(b"")
    """The same."""


@dataclass(frozen=True, slots=True)
class Connector:
    """A KV connector: data and a few functions."""

    name: str
    splits: bool
    """False: no request is ever split."""
    channel: Channel
    releases: bool
    """Blocks of a handoff that is not used can be given back before their lease ends."""
    never: frozenset[str]
    """APIs whose requests are not split, by name."""
    prefill_params: Callable[[str], bytes]
    """JSON for `kv_transfer_params` of the prefill leg, by the name of the transfer; b"": none."""
    read: Callable[[PrefillAnswer, Source], "Handoff | Rejection"]
    """The handoff of a prefill answer, checked against where it came from. No I/O; at most microseconds."""
    fits: Callable[[Handoff, EngineFacts, int], Rejection | None]
    """Whether the handoff's blocks can hold its prompt, by what is known of the prefill engine, else by the local
    engine's block size. Asked again once the side channel has told more."""
    decode_params: Callable[[Handoff], bytes]
    """JSON for `kv_transfer_params` of the decode leg."""

    @property
    def hands_off(self) -> bool:
        """A handoff crosses, from one engine to the other: there is a channel to check, and blocks to count."""
        return self.channel is not Channel.NONE

    @property
    def names_transfers(self) -> bool:
        """Both legs carry a name that is made up here, and the prefill answer holds nothing."""
        return self.channel in (Channel.P2P, Channel.MOONCAKE)
