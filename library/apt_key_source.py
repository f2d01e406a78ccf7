#!/usr/bin/python
"""Ansible module: an apt repository whose key is trusted by its fingerprint."""

from __future__ import annotations

DOCUMENTATION = r"""
module: apt_key_source
short_description: Name an apt repository, with its key checked by fingerprint
description:
  - Writes one source in deb822 form and the keyring that signs it, and nothing else; removes both without O(uri).
  - Refuses a key whose fingerprint is another, a file with several keys, and a private key, and changes nothing then.
options:
  name: {description: Name of both files, type: str, required: true}
  uri: {description: Address of the repository; empty removes it, type: str, default: ""}
  suite: {description: Suite, or a path that ends in a slash for a flat repository, type: str, default: ./}
  components: {description: Components; none for a flat repository, type: list, elements: str, default: []}
  key: {description: "Armored text of the key, or its path on the node", type: str, default: ""}
  fingerprint: {description: "The key's fingerprint, 40 or 64 hexadecimal digits", type: str, default: ""}
  root: {description: Folder of apt's configuration, type: path, default: /etc/apt}
attributes:
  check_mode: {support: full}
  diff_mode: {support: full}
author: [sparkpair contributors]
"""

EXAMPLES = r"""
- name: Name the repository
  apt_key_source:
    name: mirror
    uri: http://mirror.example/cuda/
    key: /etc/mirror.asc
    fingerprint: 0123456789ABCDEF0123456789ABCDEF01234567
"""

RETURN = r"""
source: {description: Path of the source, type: str, returned: success}
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sparkpair import files, openpgp


def read_key(text: str, expected: str) -> bytes:
    """The packets of the key, if it has the expected fingerprint. Raises KeyFileError otherwise."""
    try:
        data = text.encode() if text.lstrip().startswith("-----BEGIN") else Path(text).read_bytes()
    except OSError as error:
        raise openpgp.KeyFileError(f"no file ({error})") from error
    packets: bytes = openpgp.dearmor(data)
    found = openpgp.fingerprint(packets)
    if not openpgp.same(found, expected):
        raise openpgp.KeyFileError(f"the fingerprint {found}")
    return packets


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "uri": {"type": "str", "default": ""},
            "suite": {"type": "str", "default": "./"},
            "components": {"type": "list", "elements": "str", "default": []},
            "key": {"type": "str", "default": "", "no_log": False},
            "fingerprint": {"type": "str", "default": ""},
            "root": {"type": "path", "default": "/etc/apt"},
        },
        supports_check_mode=True,
    )
    p = module.params
    keyring = Path(p["root"]) / f"keyrings/{p['name']}.gpg"
    source = Path(p["root"]) / f"sources.list.d/{p['name']}.sources"
    wanted: dict[Path, bytes | None] = {keyring: None, source: None}
    if p["uri"]:
        try:
            wanted[keyring] = read_key(p["key"], p["fingerprint"])
        except openpgp.KeyFileError as error:
            module.fail_json(
                msg=f"found {error} in the key of {p['uri']}, expected one public key with the fingerprint "
                f"{p['fingerprint'] or '(none given)'}: gpg --show-keys on the file, then gpu_apt_keyring and "
                f"gpu_apt_fingerprint in the inventory"
            )
        lines = ["# Managed by sparkpair.", "Types: deb", f"URIs: {p['uri']}", f"Suites: {p['suite']}"]
        lines += [f"Components: {' '.join(p['components'])}"] if p["components"] else []
        wanted[source] = "\n".join([*lines, f"Signed-By: {keyring}", ""]).encode()
    changed = {path: data for path, data in wanted.items() if files.differs(path, data)}
    shown = [files.diff(path, data) for path, data in changed.items()]
    for path, data in () if module.check_mode else changed.items():
        files.put(path, data)
    module.exit_json(changed=bool(changed), diff=shown, source=str(source))


if __name__ == "__main__":
    main()
