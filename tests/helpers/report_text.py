"""What a reader sees of a report, without a browser."""

import json
import re
from html.parser import HTMLParser


class PageText(HTMLParser):
    """The words of a page, the data for its script and the addresses it refers to."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.words, self.addresses, self.within = [], [], []
        data = re.search(r'id="rollout-data">(.*?)</script>', html, re.S)
        self.data = json.loads(data[1]) if data else None
        self.feed(html)
        self.text = re.sub(r"[\s\N{NO-BREAK SPACE}]+", " ", " ".join(self.words))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.within.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "action", "srcset") and value]

    def handle_endtag(self, tag: str) -> None:
        if tag in self.within:
            del self.within[len(self.within) - 1 - self.within[::-1].index(tag) :]

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.within):
            self.words.append(data)
