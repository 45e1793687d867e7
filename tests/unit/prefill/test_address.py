"""Addresses have one form, and what is allowed in one spelling is allowed in all of them, or in none."""

import ipaddress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sidecar.prefill.address import (
    Address,
    AllowList,
    BadAddress,
    canonical_host,
    is_loopback_or_unspecified,
    parse,
)

bounded = settings(max_examples=150, deadline=None, database=None)
V4 = st.ip_addresses(v=4)
V6 = st.ip_addresses(v=6)

# -- two spellings of one address ------------------------------------------------------------------------------


@bounded
@given(V6, st.integers(1, 65535), st.booleans(), st.booleans())
def test_spellings_of_ipv6(ip: ipaddress.IPv6Address, port: int, exploded: bool, upper: bool) -> None:
    text = ip.exploded if exploded else str(ip)
    text = text.upper() if upper else text
    address = parse(f" [{text}]:{port:05d} ")
    assert address == parse(f"http://[{ip}]:{port}/")
    assert address.host == str(ip.ipv4_mapped or ip)
    assert parse(str(address)) == address


@bounded
@given(V4, st.integers(1, 65535))
def test_ipv4_is_the_same_mapped_into_ipv6(ip: ipaddress.IPv4Address, port: int) -> None:
    plain = parse(f"{ip}:{port}")
    high, low = divmod(int(ip), 1 << 16)
    for spelling in (f"::ffff:{ip}", f"::FFFF:{ip}", f"0:0:0:0:0:ffff:{ip}", f"::ffff:{high:x}:{low:x}"):
        assert parse(f"[{spelling}]:{port}") == plain
    assert plain.host == str(ip)


LABELS = st.lists(st.text("abz019-_", max_size=5).map(lambda text: f"a{text}z"), min_size=1, max_size=4)


@bounded
@given(LABELS, st.integers(1, 65535), st.integers(0, 2**32 - 1))
def test_spellings_of_names(labels: list[str], port: int, upper: int) -> None:
    name = ".".join(labels)
    shouted = "".join(char.upper() if upper >> index & 1 else char for index, char in enumerate(name))
    assert parse(f"{shouted}.:{port}") == parse(f"{name}:{port}") == Address(name, port)


@bounded
@given(st.text("0123456789abfxABX.:[]%/@-_ \t\u00e9\uff11", max_size=30))
@example("0x7f000001:80")
def test_any_text_is_an_address_of_one_form_or_none(text: str) -> None:
    try:
        address = parse(text)
    except BadAddress:
        return
    assert parse(str(address)) == address
    assert 1 <= address.port <= 65535
    assert address.host == canonical_host(address.host)
    assert address.host.isascii()
    assert not set(address.host) & set(" \t\r\n/@%?#,[]\\")


# -- tricks ----------------------------------------------------------------------------------------------------

TRICKS = [
    # What resolvers take for an address.
    *("127.1", "127.0.1", "2130706433", "0x7f000001", "0x7f.0.0.1", "0177.0.0.1", "127.0.0.0x1", "127.0.0.01"),
    *("010.0.0.1", "1.2.3.4.", "1.2.3", "1.2.3.4.5", "256.1.1.1", "1.2.3.0x", "a.1", "a.0x7f", "0", "0x"),
    # What is no host at all.
    *("", " ", ".", "..", "a..b", "-a", "a-", "a.-b", "a b", "a/b", "a@b", "user:pw@a", "a?b", "a#b", "a%b", "%61"),
    *("[a", "a]", "[::1", "::1]", "[::1]]", "[[::1]]", "[]", "::1", "fe80::1", "a:b", "//a", "a\\b"),
    *(
        "x" * 64,
        ".".join(["a" * 60] * 5),
        "ä",
        "\uff11\uff12\uff17.0.0.1",
        "\u2460.a",
        "a\x00b",
        "a\nb",
        "a\tb",
        "a,b",
        "*",
        "$(a)",
    ),
    # Scope ids make endless spellings of one address.
    *("[fe80::1%eth0]", "[fd00::1%1]", "[::ffff:10.0.0.5%x]", "[::1%25lo]", "fd00::1%x"),
    *("[10.0.0.1%x]", "[::1", "[:::]", "[1::2::3]", "[12345::]"),
]


@pytest.mark.parametrize("host", TRICKS, ids=ascii)
def test_tricks_are_refused(host: str) -> None:
    with pytest.raises(BadAddress):
        parse(f"{host}:8000")


NO_ADDRESSES = (
    *("", ":", "a", "a:", ":80", "a:0", "a:65536", "a:-1", "a:+80", "a:8 0", "a:0x50", "a:\uff18\uff10", "a:80x"),
    *("a:80.0", "10.0.0.1", "[::1]", "[::1]80", "::1:80", "https://a:80", "HTTP://a:80", "http://a", "http:///:80"),
    *("a:80/path", "a:80?x", "a:80,b:80", "http://http://a:80", "a:80//", "a:99999999999999999999"),
    *("a:1" + "0" * 9000, "a" * 9000 + ":80", "x" * 60_000, "[" * 400 + "]:80"),
)


@pytest.mark.parametrize("text", NO_ADDRESSES, ids=lambda text: ascii(text[:30]))
def test_what_is_no_host_and_port(text: str) -> None:
    with pytest.raises(BadAddress) as caught:
        parse(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400, "it goes into an answer and into the log"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10.0.0.5:8000", "10.0.0.5:8000"),
        ("[FD00:0::5]:8000", "[fd00::5]:8000"),
        ("Prefill-0.Prefill.NS.svc.cluster.local.:8000", "prefill-0.prefill.ns.svc.cluster.local:8000"),
        ("a_b:1", "a_b:1"),
        ("1e3:80", "1e3:80"),
        ("10-0-0-5.pod:80", "10-0-0-5.pod:80"),
        ("http://10.0.0.5:8000/", "10.0.0.5:8000"),
        ("[0:0:0:0:0:0:0:0]:80", "[::]:80"),
    ],
)
def test_good_addresses(text: str, expected: str) -> None:
    assert str(parse(text)) == expected


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *[(host, True) for host in ("localhost", "a.localhost", "127.0.0.1", "127.9.9.9", "0.0.0.0", "::", "::1")],
        *[(host, False) for host in ("10.0.0.5", "fd00::1", "localhost.com", "mylocalhost", "128.0.0.1", "a")],
    ],
)
def test_this_machine(host: str, expected: bool) -> None:
    assert is_loopback_or_unspecified(canonical_host(host)) is expected


def test_mapped_loopback_is_loopback() -> None:
    assert is_loopback_or_unspecified(canonical_host("::ffff:127.0.0.1"))


# -- the allow list --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "target", "admitted"),
    [
        ([], "10.0.0.5:8000", False),
        (["any"], "10.0.0.5:8000", True),
        (["any"], "example.com:1", True),
        (["10.0.0.0/8"], "10.255.255.255:1", True),
        (["10.0.0.0/8"], "11.0.0.0:1", False),
        (["10.0.0.0/8"], "[::ffff:10.1.1.1]:1", True),
        (["10.0.0.0/8"], "[::a01:101]:1", False),
        (["10.0.0.5/32"], "10.0.0.5:9999", True),
        (["0.0.0.0/0"], "1.2.3.4:1", True),
        (["0.0.0.0/0"], "[fd00::1]:1", False),
        (["::/0"], "1.2.3.4:1", False),
        (["::/0"], "[fd00::1]:1", True),
        (["fd00::/8"], "[FD00:1::1]:1", True),
        (["fd00::/8"], "[fe80::1]:1", False),
        (["10.0.0.0/8"], "ten.example.com:1", False),
        (["10.0.0.5:8000"], "10.0.0.5:8000", True),
        (["10.0.0.5:8000"], "10.0.0.5:8001", False),
        (["10.0.0.5:8000"], "[::ffff:a00:5]:8000", True),
        (["Prefill.svc.:8000"], "prefill.SVC:8000", True),
        (["prefill.svc:8000"], "a.prefill.svc:8000", False),
        (["192.168.0.0/16", "a:1", "10.0.0.0/8"], "10.0.0.1:1", True),
        ([" 10.0.0.0/8 "], "10.0.0.1:1", True),
    ],
)
def test_allow_list(entries: list[str], target: str, admitted: bool) -> None:
    allow = AllowList(entries)
    assert allow.admits(parse(target)) is admitted
    assert bool(allow) is bool(entries)


@bounded
@given(V4, st.integers(0, 32), V4)
def test_networks_admit_their_addresses_in_every_spelling(
    base: ipaddress.IPv4Address, prefix: int, ip: ipaddress.IPv4Address
) -> None:
    network = ipaddress.ip_network((base, prefix), strict=False)
    allow = AllowList([str(network)])
    assert allow.admits(parse(f"{ip}:1")) is (ip in network)
    assert allow.admits(parse(f"[::ffff:{ip}]:1")) is (ip in network)


@pytest.mark.parametrize(
    "entry",
    ["", "10.0.0.1/8", "10.0.0.0/33", "10.0.0.0/-1", "fd00::/129", "a/8", "ANY", "*", "10.0.0.5", "/", "10/8/8"],
)
def test_bad_entries(entry: str) -> None:
    with pytest.raises(BadAddress) as caught:
        AllowList([entry])
    assert "\n" not in str(caught.value)
