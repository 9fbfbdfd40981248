"""Private similarities: scalar products of clients' vectors. The server learns the products and nothing else.

The protocol is FedGS's appendix D (after Du and Zhan, 2002). The server deals masks R_a, R_b and shares with
r_a + r_b = R_a . R_b. The clients exchange A + R_a and B + R_b through the server and obtain shares with
v_1 + v_2 = A . B.

`protocol="printed"` is the paper's algorithm 2. There the server makes the masks *and* relays the masked vectors, so it
can subtract the masks: the protocol protects clients from each other, not from the server. `protocol="sealed"`, the
default, uses the same arithmetic, but the messages between clients are encrypted end to end: X25519 key agreement,
HKDF-SHA256, ChaCha20-Poly1305. The server, which deals the masks, sees ciphertexts and shares.

Arithmetic is modulo 2^64 on fixed-point numbers. A uniform mask hides such a number perfectly, which no finite range of
floating-point masks does. The result is exact for vectors that are multiples of 2^-fractional_bits; other vectors are
rounded to that grid.

The roles are objects that take messages and return messages, so any transport can carry them. `scalar_products` runs
all of them in one process. docs/guides/private-similarities.md says what the protocol protects against.
"""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedpick.core.arrays import FloatArray
from fedpick.core.errors import InvalidInput, MissingDependency, OutOfOrder
from fedpick.core.validation import choice, is_whole, require, whole

__all__ = ["SERVER", "Message", "Pair", "ScalarProductClient", "ScalarProductServer", "scalar_products"]

RandomBytes = Callable[[int], bytes]

SERVER = "server"
"""The name of the server in messages."""
_RING = 2**64
_KEY_BYTES = 32
_NONCE_BYTES = 12
_PROTOCOLS = ("sealed", "printed")


@dataclass(frozen=True)
class Pair:
    """One run of the protocol: the client in role A, the client in role B, and a nonce."""

    first: str
    """The client in role A."""
    second: str
    """The client in role B."""
    nonce: bytes
    """Different in every run of the protocol."""

    def other(self, name: str) -> str:
        """The peer of `name`."""
        return self.second if name == self.first else self.first


@dataclass(frozen=True)
class Message:
    """One message. Every message goes to the server or through it: clients do not reach each other."""

    sender: str
    """The name of a client, or `SERVER`."""
    receiver: str
    """The name of a client, or `SERVER`."""
    kind: str
    """"key", "deal", "masked", "mixed" or "share"."""
    body: bytes
    """The content; encrypted between clients."""
    pair: Pair | None = None
    """The run of the protocol; None before it starts."""


def _numbers(body: bytes) -> NDArray[np.uint64]:
    return np.frombuffer(body, dtype="<u8")


def _bytes_of(value: int) -> bytes:
    return (value % _RING).to_bytes(8, "little")


def _dot(left: NDArray[np.uint64], right: NDArray[np.uint64]) -> int:
    return int((left * right).sum(dtype=np.uint64))  # unsigned arrays wrap around: arithmetic modulo 2^64


class ScalarProductServer:
    """The server: deals masks, relays messages and adds two shares per pair.

    Args:
        pairs: names of the clients of each product, each pair once.
        dimension: length of the vectors.
        fractional_bits: fractional bits of the fixed-point numbers, equal for the server and all clients.
        random_bytes: a cryptographic source. Replace it in tests only.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[str, str]],
        dimension: int,
        *,
        fractional_bits: int = 20,
        random_bytes: RandomBytes = secrets.token_bytes,
    ) -> None:
        whole("ScalarProductServer", "dimension", 1, value=dimension)
        self.products: dict[tuple[str, str], float] = {}
        self._pairs = list(pairs)
        self._dimension = dimension
        self._scale = float(2 ** (2 * fractional_bits))
        self._random = random_bytes
        self._keys: dict[str, bytes] = {}
        self._shares: dict[Pair, dict[str, int]] = {}  # of unfinished runs

    @property
    def done(self) -> bool:
        """Whether all products are known."""
        return len(self.products) == len(self._pairs)

    def receive(self, message: Message) -> list[Message]:
        """Process one message and return the messages to send."""
        if message.receiver != SERVER:
            return [message]  # relayed unchanged
        if message.kind == "key":
            self._keys[message.sender] = message.body
            ready = [pair for pair in self._pairs if message.sender in pair and set(pair) <= self._keys.keys()]
            return [deal for first, second in ready for deal in self._deal(first, second)]
        if message.kind == "share" and message.pair is not None:
            self._add(message.pair, message.sender, int.from_bytes(message.body, "little"))
            return []
        raise InvalidInput(f"The server expects messages of the kind 'key' or 'share'. Got {message.kind!r}.")

    def _deal(self, first: str, second: str) -> list[Message]:
        """Deal new masks to one pair. A mask that is used twice would reveal differences of vectors."""
        pair = Pair(first, second, self._random(16))
        self._shares[pair] = {}
        mask_a, mask_b = (_numbers(self._random(8 * self._dimension)) for _ in range(2))
        share_a = int.from_bytes(self._random(8), "little")
        share_b = _dot(mask_a, mask_b) - share_a
        return [
            Message(SERVER, first, "deal", self._keys[second] + mask_a.tobytes() + _bytes_of(share_a), pair),
            Message(SERVER, second, "deal", self._keys[first] + mask_b.tobytes() + _bytes_of(share_b), pair),
        ]

    def _add(self, pair: Pair, sender: str, share: int) -> None:
        if pair not in self._shares or sender not in (pair.first, pair.second):
            raise InvalidInput(
                f"The server got a share from {sender!r} for a run that it did not start or that has ended."
            )
        shares = self._shares[pair]
        shares[sender] = share
        if len(shares) < 2:
            return
        del self._shares[pair]
        total = sum(shares.values()) % _RING
        signed = total - _RING if total >= _RING // 2 else total
        self.products[pair.first, pair.second] = signed / self._scale


@dataclass
class _Run:
    """A client's part of one run of the protocol."""

    peer_key: bytes = b""
    mask: NDArray[np.uint64] | None = None
    share: int = 0
    masked: NDArray[np.uint64] | None = None  # the peer's masked vector
    mixed: int | None = None  # u
    waiting: list[Message] = field(default_factory=list)  # arrived before the masks
    finished: bool = False


class ScalarProductClient:
    """A client: holds one vector and reveals only shares of its products.

    Args:
        name: unique among the clients.
        vector: (d,) finite numbers.
        protocol: "sealed" or "printed".
        fractional_bits: fractional bits of the fixed-point numbers, equal for the server and all clients.
        trusted: name -> public key, obtained over a channel that the server does not control. A peer that is missing
            here or has another key is refused. None: trust the keys that the server relays.
        random_bytes: a cryptographic source. Replace it in tests only.
    """

    def __init__(
        self,
        name: str,
        vector: ArrayLike,
        *,
        protocol: str = "sealed",
        fractional_bits: int = 20,
        trusted: Mapping[str, bytes] | None = None,
        random_bytes: RandomBytes = secrets.token_bytes,
    ) -> None:
        choice("ScalarProductClient", "protocol", _PROTOCOLS, value=protocol)
        self.name = name
        self._vector = _fixed_point(vector, fractional_bits)
        self._trusted = trusted
        self._random = random_bytes
        self._seal = _Seal(name, random_bytes) if protocol == "sealed" else None
        self._runs: dict[Pair, _Run] = {}

    @property
    def public_key(self) -> bytes:
        """The key for the peers; empty in the printed protocol."""
        return self._seal.public_key if self._seal else b""

    def start(self) -> Message:
        """Return the first message, which carries the public key."""
        return Message(self.name, SERVER, "key", self.public_key)

    def receive(self, message: Message) -> list[Message]:
        """Process one message and return the messages to send. Messages may arrive in any order."""
        pair = message.pair
        if pair is None or self.name not in (pair.first, pair.second):
            raise InvalidInput(f"Client {self.name!r} got a message of a pair that it is not part of.")
        run = self._runs.setdefault(pair, _Run())
        if message.kind == "deal":
            return self._dealt(pair, run, message.body)
        if message.kind not in ("masked", "mixed"):
            raise InvalidInput(f"A client expects 'deal', 'masked' or 'mixed'. Got {message.kind!r}.")
        if run.mask is None:
            run.waiting.append(message)
            return []
        body = _numbers(self._open(message, run, pair))
        if message.kind == "masked":
            if run.masked is not None or len(body) != len(self._vector):
                raise InvalidInput(f"Client {self.name!r} got a second masked vector, or one of another length.")
            run.masked = body
        else:
            run.mixed = int(body[0])
        return self._continue(pair, run)

    def _dealt(self, pair: Pair, run: _Run, body: bytes) -> list[Message]:
        if run.mask is not None:
            raise OutOfOrder(f"Client {self.name!r} got masks twice for one run: a mask is used once.")
        peer = pair.other(self.name)
        size = _KEY_BYTES if self._seal else 0
        run.peer_key, numbers = body[:size], _numbers(body[size:])
        if len(numbers) != len(self._vector) + 1:
            raise InvalidInput(f"The masks must have {len(self._vector)} numbers. Got {len(numbers) - 1}.")
        if self._seal and self._trusted is not None and self._trusted.get(peer) != run.peer_key:
            raise InvalidInput(
                f"The server offers a key for {peer!r} that is not the trusted one. It may read the messages. "
                "Nothing was sent."
            )
        run.mask, run.share = numbers[:-1], int(numbers[-1])
        sent = [self._message(pair, run, "masked", (self._vector + run.mask).tobytes())]
        for early in run.waiting:
            sent += self.receive(early)
        run.waiting.clear()
        return sent

    def _continue(self, pair: Pair, run: _Run) -> list[Message]:
        """Take steps 5 and 7 of algorithm 2 as soon as their inputs have arrived."""
        if run.masked is None or run.mask is None or run.finished:
            return []
        if self.name == pair.second:
            run.finished = True
            own = int.from_bytes(self._random(8), "little")  # v_2
            mixed = _dot(run.masked, self._vector) + run.share - own  # u
            return [
                self._message(pair, run, "mixed", _bytes_of(mixed)),
                Message(self.name, SERVER, "share", _bytes_of(own), pair),
            ]
        if run.mixed is None:
            return []
        run.finished = True
        own = run.mixed - _dot(run.mask, run.masked) + run.share  # v_1
        return [Message(self.name, SERVER, "share", _bytes_of(own), pair)]

    def _message(self, pair: Pair, run: _Run, kind: str, body: bytes) -> Message:
        peer = pair.other(self.name)
        if self._seal:
            body = self._seal.close(body, run.peer_key, pair, self.name, peer, kind)
        return Message(self.name, peer, kind, body, pair)

    def _open(self, message: Message, run: _Run, pair: Pair) -> bytes:
        if not self._seal:
            return message.body
        return self._seal.open(message.body, run.peer_key, pair, pair.other(self.name), self.name, message.kind)


class _Seal:
    """End-to-end encryption between two clients, with a new key for every message."""

    def __init__(self, name: str, random_bytes: RandomBytes) -> None:
        self._tools = _cryptography()
        self._name = name
        self._random = random_bytes
        self._private = self._tools["X25519PrivateKey"].from_private_bytes(random_bytes(_KEY_BYTES))
        self.public_key: bytes = self._private.public_key().public_bytes_raw()

    def _cipher(
        self, peer_key: bytes, pair: Pair, sender: str, receiver: str, kind: str, sender_key: bytes
    ) -> tuple[Any, bytes]:
        """Return the cipher of one message and its context: run, roles, direction, kind and sender's key."""
        parts = (pair.nonce, pair.first, pair.second, sender, receiver, kind, sender_key)
        fields = [part.encode() if isinstance(part, str) else part for part in parts]
        context = b"fedpick scalar product" + b"".join(len(part).to_bytes(4, "little") + part for part in fields)
        try:
            secret = self._private.exchange(self._tools["X25519PublicKey"].from_public_bytes(peer_key))
        except ValueError as error:
            raise InvalidInput(f"Client {self._name!r} got an invalid public key: {error}.") from error
        derive = self._tools["HKDF"](algorithm=self._tools["SHA256"](), length=_KEY_BYTES, salt=None, info=context)
        return self._tools["ChaCha20Poly1305"](derive.derive(secret)), context

    def close(self, body: bytes, peer_key: bytes, pair: Pair, sender: str, receiver: str, kind: str) -> bytes:
        cipher, context = self._cipher(peer_key, pair, sender, receiver, kind, self.public_key)
        nonce = self._random(_NONCE_BYTES)
        return nonce + bytes(cipher.encrypt(nonce, body, context))

    def open(self, body: bytes, peer_key: bytes, pair: Pair, sender: str, receiver: str, kind: str) -> bytes:
        cipher, context = self._cipher(peer_key, pair, sender, receiver, kind, peer_key)
        try:
            return bytes(cipher.decrypt(body[:_NONCE_BYTES], body[_NONCE_BYTES:], context))
        except (self._tools["InvalidTag"], ValueError) as error:  # ValueError: too short to be a message
            raise InvalidInput(
                f"Client {self._name!r} got a {kind!r} message from {sender!r} that was altered on the way, or sealed "
                "for another client. Start the pair again."
            ) from error


def _cryptography() -> dict[str, Any]:
    try:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ModuleNotFoundError as error:
        raise MissingDependency(
            "Private similarities need the package cryptography. Install it with: pip install 'fedpick[private]'"
        ) from error
    tools = (InvalidTag, X25519PrivateKey, X25519PublicKey, ChaCha20Poly1305, SHA256, HKDF)
    return {tool.__name__: tool for tool in tools}


def _fixed_point(vector: ArrayLike, fractional_bits: int) -> NDArray[np.uint64]:
    """Return the vector as whole multiples of 2^-fractional_bits, modulo 2^64."""
    values = np.asarray(vector, dtype=np.float64)
    if values.ndim != 1 or len(values) == 0 or not np.isfinite(values).all():
        raise InvalidInput(f"The vector must be a row of finite numbers. Got an array of shape {values.shape}.")
    in_range = is_whole(fractional_bits, 0) and fractional_bits <= 30
    expected = "a whole number in [0, 30]"
    require(in_range, "ScalarProductClient", "fractional_bits", expected, value=fractional_bits)
    scaled = np.rint(values * 2.0**fractional_bits)
    # |A . B| <= |A| |B|: the product of two vectors within this limit does not overflow.
    if not (scaled**2).sum() < 2.0**62:
        raise InvalidInput(
            f"The vector is too long for {fractional_bits} fractional bits: its length must stay below "
            f"{2.0 ** (31 - fractional_bits):g}. Scale it down, or use fewer bits."
        )
    return scaled.astype(np.int64).view(np.uint64)


def scalar_products(
    vectors: ArrayLike,
    *,
    protocol: str = "sealed",
    fractional_bits: int = 20,
    on_message: Callable[[Message], None] = lambda message: None,
) -> FloatArray:
    """Run the server and all clients in this process. Return the scalar products that the server learns.

    Args:
        vectors: (N, d); row k is the vector of client k.
        protocol: "sealed" or "printed".
        fractional_bits: fractional bits of the fixed-point numbers.
        on_message: called with every message. All messages pass the server, so this is what the server sees.

    Returns:
        (N, N), symmetric. The diagonal is 0: the protocol does not compute a client's own length.

    >>> scalar_products([[1.0, 2.0], [3.0, 0.5], [0.0, 1.0]])
    array([[0. , 4. , 2. ],
           [4. , 0. , 0.5],
           [2. , 0.5, 0. ]])
    """
    rows = np.asarray(vectors, dtype=np.float64)
    if rows.ndim != 2:
        raise InvalidInput(f"vectors must have the shape (clients, numbers). Got {rows.shape}.")
    clients = {
        str(index): ScalarProductClient(str(index), row, protocol=protocol, fractional_bits=fractional_bits)
        for index, row in enumerate(rows)
    }
    pairs = list(itertools.combinations(clients, 2))
    server = ScalarProductServer(pairs, rows.shape[1], fractional_bits=fractional_bits)
    queue = deque(client.start() for client in clients.values())
    while queue:
        message = queue.popleft()
        on_message(message)
        # Every client's message passes the server, even if another client is its receiver.
        sent = server.receive(message) if message.sender != SERVER else [message]
        for outgoing in sent:
            if outgoing.sender == SERVER and outgoing is not message:
                queue.append(outgoing)
            else:
                queue.extend(clients[outgoing.receiver].receive(outgoing))
    products = np.zeros((len(rows), len(rows)))
    for (first, second), value in server.products.items():
        products[int(first), int(second)] = products[int(second), int(first)] = value
    return products
