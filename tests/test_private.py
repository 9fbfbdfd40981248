"""Private similarities: exact results, the attack on the printed protocol, and what the sealed one leaves to see."""

from __future__ import annotations

import itertools
import random
import sys

import numpy as np
import pytest

import fedpick
from fedpick.core.errors import InvalidInput, MissingDependency, OutOfOrder
from fedpick.policies._graph import GraphRule, build_graph
from fedpick.private import SERVER, Message, Pair, ScalarProductClient, ScalarProductServer, scalar_products

pytest.importorskip("cryptography")

DEAL_KEY_BYTES = {"sealed": 32, "printed": 0}


def fixed_bytes(seed):
    """A replaceable source for tests: the same bytes in every run."""
    return random.Random(seed).randbytes


def run_pair(first, second, protocol="sealed", seed=None, shuffle=None):
    """One run between two clients: (product, all messages)."""
    names = ("a", "b")
    sources = [{} if seed is None else {"random_bytes": fixed_bytes(seed + number)} for number in range(3)]
    clients = {
        name: ScalarProductClient(name, vector, protocol=protocol, **source)
        for name, vector, source in zip(names, (first, second), sources, strict=False)
    }
    server = ScalarProductServer([names], len(first), **sources[2])
    queue, seen = [client.start() for client in clients.values()], []
    while queue:
        message = queue.pop(0 if shuffle is None else shuffle.randrange(len(queue)))
        seen.append(message)
        if message.receiver == SERVER:
            queue += server.receive(message)
        else:
            queue += clients[message.receiver].receive(message)
    return server.products[names], seen


def of_kind(messages, kind, sender=None):
    return [m for m in messages if m.kind == kind and sender in (None, m.sender)]


@pytest.mark.parametrize("protocol", ["sealed", "printed"])
def test_products_are_exact(protocol):
    rng = np.random.default_rng(0)
    counts = rng.integers(-500, 500, size=(6, 10)).astype(float)
    products = scalar_products(counts, protocol=protocol, fractional_bits=0)
    expected = counts @ counts.T
    np.fill_diagonal(expected, 0.0)
    np.testing.assert_array_equal(products, expected)


def test_fractions_are_exact_on_the_grid_and_near_off_it():
    rng = np.random.default_rng(1)
    on_grid = rng.integers(-(2**20), 2**20, size=(4, 7)) / 2.0**20
    exact = np.array(
        [[sum(int(a) * int(b) for a, b in zip(x, y, strict=True)) for y in on_grid * 2**20] for x in on_grid * 2**20]
    )
    np.fill_diagonal(exact, 0)
    np.testing.assert_array_equal(scalar_products(on_grid), exact / 2.0**40)
    shares = rng.dirichlet(np.full(10, 0.3), 4)
    off_diagonal = ~np.eye(4, dtype=bool)
    # Each entry is off by at most 2^-21, and the entries of a row of shares sum to 1: 2 * 2^-21 and a little.
    assert np.abs(scalar_products(shares) - shares @ shares.T)[off_diagonal].max() < 1.1e-6


def test_messages_may_arrive_in_any_order():
    for seed in range(30):
        value, _ = run_pair([1.0, -2.0, 3.0], [4.0, 5.0, 0.5], shuffle=random.Random(seed))
        assert value == -4.5


@pytest.mark.parametrize("protocol", ["sealed", "printed"])
def test_the_server_unmasks_the_printed_protocol_and_not_the_sealed_one(protocol):
    vector = np.array([3.0, 1.0, 4.0, 1.5])
    value, seen = run_pair(vector, [1.0, 2.0, 0.0, 2.0], protocol)
    assert value == 8.0
    (deal,) = [m for m in of_kind(seen, "deal") if m.receiver == "a"]
    mask = np.frombuffer(deal.body[DEAL_KEY_BYTES[protocol] :], dtype="<u8")[:-1]
    (masked,) = of_kind(seen, "masked", "a")
    # What the server dealt, subtracted from what it relays.
    numbers = np.frombuffer(masked.body[: len(masked.body) // 8 * 8], dtype="<u8")[: len(mask)]
    recovered = (numbers - mask[: len(numbers)]).view(np.int64) / 2.0**20
    assert np.array_equal(recovered, vector) == (protocol == "printed")


def test_what_the_server_sees_does_not_determine_a_vector():
    """Two vectors with the same product give, with the same random numbers, the same open part of the transcript."""
    other = np.array([1.0, 1.0, 2.0])
    one, two = np.array([5.0, 1.0, 0.0]), np.array([0.0, 2.0, 2.0])
    assert one @ other == two @ other

    def transcripts(protocol):
        return [run_pair(vector, other, protocol, seed=7)[1] for vector in (one, two)]

    sealed, open_text = ("masked", "mixed"), ("key", "deal", "share")
    first, second = transcripts("sealed")
    assert [(m.kind, m.sender, len(m.body)) for m in first] == [(m.kind, m.sender, len(m.body)) for m in second]
    assert [m for m in first if m.kind in open_text] == [m for m in second if m.kind in open_text]
    assert {m.kind for m in first} == {*sealed, *open_text}
    # The same comparison tells the two apart in the printed protocol: the test can fail.
    first, second = transcripts("printed")
    assert of_kind(first, "masked", "a") != of_kind(second, "masked", "a")


def test_the_shares_alone_are_uniform():
    shares = []
    for _ in range(300):
        _, seen = run_pair([2.0, 3.0], [5.0, 7.0])
        shares.append([int.from_bytes(m.body, "little") / 2.0**64 for m in of_kind(seen, "share")])
    for column in np.sort(np.array(shares), axis=0).T:
        # Kolmogorov-Smirnov at 300 draws: 0.127 is exceeded about once in ten thousand.
        assert np.abs(column - (np.arange(300) + 0.5) / 300).max() < 0.127


def test_masks_are_never_used_twice():
    seen = []
    scalar_products(np.eye(4), on_message=seen.append)
    masks = [m.body[32:] for m in of_kind(seen, "deal")]
    assert len(masks) == 12 == len(set(masks))
    client = ScalarProductClient("a", [1.0, 2.0], protocol="printed")
    deal = Message(SERVER, "a", "deal", bytes(24), Pair("a", "b", b"1"))
    client.receive(deal)
    with pytest.raises(OutOfOrder, match="a mask is used once"):
        client.receive(deal)


def deliver_until(kind, clients, server):
    """Carry messages until one of this kind comes up; returns it."""
    queue = [client.start() for client in clients.values()]
    while queue:
        message = queue.pop(0)
        if message.kind == kind:
            return message
        target = server if message.receiver == SERVER else clients[message.receiver]
        queue += target.receive(message)
    raise AssertionError(f"no message of the kind {kind}")


@pytest.mark.parametrize("damage", [lambda body: body[:-1] + bytes([body[-1] ^ 1]), lambda body: body[:5]])
def test_a_message_that_was_altered_is_refused(damage):
    clients = {name: ScalarProductClient(name, [1.0, 2.0]) for name in "ab"}
    message = deliver_until("masked", clients, ScalarProductServer([("a", "b")], 2))
    altered = Message(message.sender, message.receiver, message.kind, damage(message.body), message.pair)
    with pytest.raises(InvalidInput, match="altered on the way"):
        clients[message.receiver].receive(altered)
    assert clients[message.receiver].receive(message)  # the true one is still welcome


def test_a_server_in_the_middle_is_found_out_by_trusted_keys():
    honest = ScalarProductClient("b", [1.0, 2.0])
    fake = ScalarProductClient("b", [0.0, 0.0])
    victim = ScalarProductClient("a", [3.0, 4.0], trusted={"b": honest.public_key})
    pair = Pair("a", "b", b"0123456789abcdef")
    with pytest.raises(InvalidInput, match="not the trusted one"):
        victim.receive(Message(SERVER, "a", "deal", fake.public_key + bytes(24), pair))
    sent = victim.receive(Message(SERVER, "a", "deal", honest.public_key + bytes(24), Pair("a", "b", b"2")))
    assert [m.kind for m in sent] == ["masked"]
    with pytest.raises(InvalidInput, match="invalid public key"):
        ScalarProductClient("a", [3.0, 4.0]).receive(Message(SERVER, "a", "deal", bytes(32 + 24), pair))


def test_wrong_input_is_refused():
    with pytest.raises(InvalidInput, match=r"'sealed' or 'printed'\. Got 'open'"):
        ScalarProductClient("a", [1.0], protocol="open")
    with pytest.raises(InvalidInput, match="row of finite numbers"):
        ScalarProductClient("a", [np.nan])
    with pytest.raises(InvalidInput, match="length must stay below 2048"):
        ScalarProductClient("a", [3000.0])
    with pytest.raises(InvalidInput, match=r"'fractional_bits' parameter .* must be a whole number in \[0, 30\]"):
        ScalarProductClient("a", [1.0], fractional_bits=31)
    with pytest.raises(InvalidInput, match="'dimension' parameter"):
        ScalarProductServer([("a", "b")], 0)
    with pytest.raises(InvalidInput, match=r"shape \(clients, numbers\)"):
        scalar_products([1.0, 2.0])
    client = ScalarProductClient("a", [1.0, 2.0], protocol="printed")
    pair = Pair("a", "b", b"1")
    with pytest.raises(InvalidInput, match="not part of"):
        client.receive(Message(SERVER, "a", "deal", b"", Pair("c", "d", b"1")))
    with pytest.raises(InvalidInput, match=r"must have 2 numbers\. Got 4"):
        client.receive(Message(SERVER, "a", "deal", bytes(40), pair))
    with pytest.raises(InvalidInput, match="expects 'deal', 'masked' or 'mixed'"):
        client.receive(Message("b", "a", "share", b"", pair))
    client.receive(Message(SERVER, "a", "deal", bytes(24), pair))
    with pytest.raises(InvalidInput, match="one of another length"):
        client.receive(Message("b", "a", "masked", bytes(8), pair))


def test_the_server_takes_shares_of_its_own_runs_only():
    server = ScalarProductServer([("a", "b")], 2)
    with pytest.raises(InvalidInput, match="did not start"):
        server.receive(Message("a", SERVER, "share", bytes(8), Pair("a", "b", b"1")))
    with pytest.raises(InvalidInput, match="'key' or 'share'"):
        server.receive(Message("a", SERVER, "masked", b""))
    assert not server.done


def test_a_missing_library_names_the_extra(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(MissingDependency, match=r"pip install 'fedpick\[private\]'"):
        ScalarProductClient("a", [1.0])
    assert scalar_products(np.eye(2), protocol="printed").tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_fedgs_chooses_from_private_products_as_from_open_features():
    rng = np.random.default_rng(2)
    shares = np.round(rng.dirichlet(np.full(10, 0.3), 12) * 2**12) / 2**12
    products = scalar_products(shares)
    policy = fedpick.policies.get("fedgs", similarity="products")
    session = fedpick.Session(policy, fedpick.Clients(num_examples=np.ones(12), features=products))
    exact = build_graph(shares, GraphRule(), 100).between_clients()
    np.testing.assert_allclose(session.state.distance, exact, rtol=1e-9)
    chosen = session.ask(budget=3).clients
    best = max(exact[np.ix_(c, c)].sum() for c in itertools.combinations(range(12), 3))
    assert exact[np.ix_(chosen, chosen)].sum() == pytest.approx(best)
