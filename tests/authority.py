"""A certificate authority for tests."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tandem.security import NAME, TLS


class Authority:
    """A CA in a folder, made by the openssl command."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self._openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=ca", "-days", "2",
                      "-keyout", "ca.key", "-out", "ca.pem")  # fmt: skip

    def issue(self, name: str, to: str = NAME) -> TLS:
        (self.folder / "san").write_text(f"subjectAltName=DNS:{to}", encoding="utf-8")
        self._openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}", "-keyout", f"{name}.key",
                      "-out", f"{name}.csr")  # fmt: skip
        self._openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                      "-days", "2", "-extfile", "san", "-out", f"{name}.pem")  # fmt: skip
        return TLS(self.folder / f"{name}.pem", self.folder / f"{name}.key", self.folder / "ca.pem")

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self.folder, check=True, capture_output=True, timeout=30)
