"""`python contents.py IMAGE`, while an image is built: its SBOM (CycloneDX 1.5) and a list of licences, as files.

share/tandem/sbom.cdx.json and share/tandem/licences.txt of the virtual environment, which the image has. Both name the
wheels in it and the packages of Debian below it.
"""

import json
import platform
import subprocess
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path

Component = dict[str, object]


def wheels() -> list[Component]:
    found = sorted(distributions(path=[path for path in sys.path if path.startswith(sys.prefix)]), key=lambda d: d.name)
    return [component("pypi", one.name, one.version, licence_of(one)) for one in found]


def licence_of(one: Distribution) -> str:
    """SPDX where the wheel says it; else what its classifiers say, or the beginning of its own words."""
    said = one.metadata.get("License-Expression")
    classified = [c.rpartition(" :: ")[2] for c in one.metadata.get_all("Classifier") or () if c.startswith("License")]
    words = (one.metadata.get("License") or "").strip().partition("\n")[0][:80]
    return str(said or ", ".join(classified) or words or "not said")


def debian() -> list[Component]:
    """A licence of each is in /usr/share/doc/NAME/copyright."""
    if not Path("/usr/bin/dpkg-query").exists():
        return []
    listed = ["dpkg-query", "--show", "--showformat=${Package} ${Version}\n"]
    lines = subprocess.run(listed, capture_output=True, encoding="utf-8", check=True).stdout.splitlines()
    return [component("deb", *line.split(), licence="see /usr/share/doc") for line in sorted(lines)]


def component(kind: str, name: str, version: str, licence: str) -> Component:
    path = f"debian/{name}" if kind == "deb" else name.lower().replace("_", "-")
    return {
        "type": "library", "name": name, "version": version, "purl": f"pkg:{kind}/{path}@{version}",
        "licenses": [{"license": {"name": licence}}],
    }  # fmt: skip


def main(image: str) -> None:
    components = [*wheels(), *debian()]
    about = {"component": {"type": "container", "name": f"tandem-{image}"}}
    sbom = {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "metadata": about, "components": components}
    folder = Path(sys.prefix) / "share" / "tandem"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sbom.cdx.json").write_text(json.dumps(sbom, indent=1) + "\n", encoding="utf-8")
    lines = [f"{one['purl']}: {one['licenses'][0]['license']['name']}" for one in components]  # type: ignore[index]
    (folder / "licences.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(components)} components on {platform.machine()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
