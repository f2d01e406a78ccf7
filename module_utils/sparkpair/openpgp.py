"""The fingerprint of an OpenPGP public key, so that a repository's key is trusted by it and no gpg is needed.

RFC 4880 and 9580: a key is a sequence of packets; the fingerprint is a hash over the first one.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterator

PUBLIC_KEY, SECRET_KEY, SECRET_SUBKEY = 6, 5, 7
"""Packet tags."""


class KeyFileError(ValueError):
    """Not one public key; the text says what it is instead."""


def crc24(data: bytes) -> int:
    """The checksum of ASCII armor."""
    crc = 0xB704CE
    for byte in data:
        crc ^= byte << 16
        for _ in range(8):
            crc <<= 1
            if crc & 0x1000000:
                crc ^= 0x1864CFB
    return crc & 0xFFFFFF


def dearmor(data: bytes) -> bytes:
    """The packets of an armored or binary key. Raises KeyFileError for damaged armor."""
    if not data.lstrip().startswith(b"-----BEGIN"):
        return data
    match = re.search(
        rb"-----BEGIN PGP PUBLIC KEY BLOCK-----\r?\n(?:[^\r\n]+: [^\r\n]*\r?\n)*\r?\n(.*?)"
        rb"(?:\r?\n=([A-Za-z0-9+/]{4}))?\r?\n-----END PGP PUBLIC KEY BLOCK-----",
        data,
        re.DOTALL,
    )
    if match is None:
        raise KeyFileError("armor that is not one whole PGP PUBLIC KEY BLOCK")
    try:
        packets = base64.b64decode(b"".join(match.group(1).split()), validate=True)
        checksum = base64.b64decode(match.group(2)) if match.group(2) else None
    except binascii.Error as error:
        raise KeyFileError(f"armor with broken base64 ({error})") from error
    if checksum is not None and int.from_bytes(checksum, "big") != crc24(packets):
        raise KeyFileError("armor whose checksum does not fit")
    return packets


def read_packets(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Tag and body of every packet. Raises KeyFileError where the bytes are no packets."""
    at = 0
    while at < len(data):
        head = data[at]
        if not head & 0x80:
            raise KeyFileError("bytes that are no OpenPGP packets")
        if head & 0x40:
            tag, first = head & 0x3F, data[at + 1] if at + 1 < len(data) else 255
            if first < 192:
                size, at = first, at + 2
            elif first < 224:
                size, at = ((first - 192) << 8) + int.from_bytes(data[at + 2 : at + 3], "big") + 192, at + 3
            elif first == 255:
                size, at = int.from_bytes(data[at + 2 : at + 6], "big"), at + 6
            else:
                raise KeyFileError("a key of partial packets")
        else:
            tag, kind = (head >> 2) & 0x0F, head & 3
            if kind == 3:
                raise KeyFileError("a packet without a length")
            width = 1 << kind
            size, at = int.from_bytes(data[at + 1 : at + 1 + width], "big"), at + 1 + width
        if at + size > len(data):
            raise KeyFileError("a key that ends in the middle of a packet")
        yield tag, data[at : at + size]
        at += size


def fingerprint(packets: bytes) -> str:
    """Fingerprint of the one public key in `packets`, upper-case hexadecimal. Raises KeyFileError for anything else."""
    found = list(read_packets(packets))
    if any(tag in (SECRET_KEY, SECRET_SUBKEY) for tag, _ in found):
        raise KeyFileError("a private key")
    keys = [body for tag, body in found if tag == PUBLIC_KEY]
    if len(keys) != 1 or found[0][0] != PUBLIC_KEY or not keys[0]:
        raise KeyFileError(f"{len(keys)} public keys instead of one")
    body = keys[0]
    if body[0] == 4:
        # RFC 4880 fixes SHA-1 for the fingerprints of version 4; it names a key and signs nothing.
        return hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body, usedforsecurity=False).hexdigest().upper()
    if body[0] == 6:
        return hashlib.sha256(b"\x9b" + len(body).to_bytes(4, "big") + body).hexdigest().upper()
    raise KeyFileError(f"a key of version {body[0]}, expected 4 or 6")


def same(one: str, other: str) -> bool:
    """Whether two fingerprints are equal, however they are spaced; short ids are never enough."""
    first, second = (re.sub(r"[\s:]", "", text).upper().removeprefix("0X") for text in (one, other))
    return len(first) in (40, 64) and first == second
