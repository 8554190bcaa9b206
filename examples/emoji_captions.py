"""A folder of emoji with their names as captions, from packages that are installed already.

npm install emoji-datasource-google@16.0.0 emoji-datasource-twitter@16.0.0
python examples/emoji_captions.py emoji node_modules/emoji-datasource-google node_modules/emoji-datasource-twitter
unfog train emoji --condition text --size 16

Names are those of Unicode in lower case. `--leave-out` keeps emoji of some names out, so that their words are seen in
other names, and never together.
"""

import argparse
import csv
import json
from pathlib import Path

from PIL import Image

_SKIN = {
    "1F3FB": "light skin tone",
    "1F3FC": "medium light skin tone",
    "1F3FD": "medium skin tone",
    "1F3FE": "medium dark skin tone",
    "1F3FF": "dark skin tone",
}


def captions(package: Path) -> dict[str, str]:
    """Return the caption of each picture of a package, by the name of its file."""
    found = {}
    for row in json.loads((package / "emoji.json").read_text("utf-8")):
        name = (row["name"] or row["short_name"].replace("_", " ").replace("-", " ")).lower()
        found[row["image"].lower()] = name
        for code, variation in row.get("skin_variations", {}).items():
            tones = [_SKIN[part] for part in code.split("-") if part in _SKIN]
            found[variation["image"].lower()] = ", ".join([name, *dict.fromkeys(tones)])
    return found


def write(package: Path, out: Path, leave_out: set[str]) -> list[tuple[str, str]]:
    """Write the pictures of a package on white; return (file, caption) of each."""
    vendor = package.name.rpartition("-")[2] if package.name != "package" else package.parent.name.split("-")[2]
    names, rows = captions(package), []
    for path in sorted((package / "img" / vendor / "64").glob("*.png")):
        caption = names.get(path.name.lower(), "")
        if not caption or caption in leave_out:
            continue
        with Image.open(path, formats=["PNG"]) as opened:
            image = opened.convert("RGBA")
        flat = Image.new("RGB", image.size, "white")
        flat.paste(image, mask=image.getchannel("A"))
        file = f"{vendor}_{path.name}"
        flat.save(out / file, compress_level=1)
        rows.append((file, caption))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to write: pictures and metadata.csv")
    parser.add_argument("packages", type=Path, nargs="+", help="folders of emoji-datasource-google, -twitter, -apple …")
    parser.add_argument("--leave-out", action="append", default=[], metavar="NAME", help='such as "large blue square"')
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    rows = [row for package in asked.packages for row in write(package, asked.out, {*asked.leave_out})]
    if not rows:
        parser.error("no pictures of 64 pixels are in these packages")
    with open(asked.out / "metadata.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["file_name", "text"])
        writer.writerows(rows)
    print(f"{asked.out}: {len(rows):,} pictures of {len({text for _, text in rows}):,} names")


if __name__ == "__main__":
    main()
