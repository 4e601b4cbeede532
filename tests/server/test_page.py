"""The page at `/` in a real Chromium, before a running `legato serve` with SmolLM2."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from selenium.webdriver.common.keys import Keys

from tests.server.browser import Browser
from tests.server.legato_server import KEY, Server

HEADERS = {"Authorization": f"Bearer {KEY}"}
QUESTION = "Name three colours of the sky."
STORY = "Tell a very long story about a ship."


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def server(chromium: Browser) -> Iterator[Server]:
    server = Server("--api-key", KEY)
    yield server
    chromium.driver.get(server.url)
    chromium.wait(lambda: chromium.find("#connection").text == "live")
    server.stop()  # whoever watches does not keep it
    chromium.wait(lambda: chromium.find("#connection").text == "The server cannot be reached.")


@pytest.fixture
def page(server: Server, chromium: Browser) -> Iterator[Browser]:
    """The page with the key; at its end nobody has complained, and nobody else was asked for anything."""
    chromium.driver.get(server.url)
    chromium.driver.execute_script("sessionStorage.clear()")
    chromium.complaints(), chromium.addresses()
    chromium.driver.execute_script("sessionStorage.setItem('legato-api-key', arguments[0])", KEY)
    chromium.driver.get(server.url)
    chromium.wait(lambda: chromium.find("#connection").text == "live")
    yield chromium
    assert chromium.complaints() == []
    asked = chromium.addresses()
    assert asked and all(address.startswith(f"{server.url}/") for address in asked)


def _set(page: Browser, **settings: str) -> None:
    if not page.find("#settings").get_property("open"):
        page.find("#settings summary").click()
    for name, value in settings.items():
        page.find(f"#settings [name={name}]").send_keys(value)


def _ask(page: Browser, text: str) -> None:
    page.find("#prompt").send_keys(text, Keys.ENTER)


def _answers(page: Browser) -> list[str]:
    return page.texts("#conversation .assistant .text")


def _is_done(page: Browser) -> bool:
    return page.find("#send").is_displayed()


def _told(server: Server, messages: list[dict[str, str]], max_tokens: int = 40) -> str:
    with server.client() as client:
        asked: Any = {"model": "smollm2", "messages": messages, "temperature": 0, "max_tokens": max_tokens}
        return client.chat.completions.create(**asked).choices[0].message.content or ""


def _metric(server: Server, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics", headers=HEADERS).text
    return float(re.search(rf"^{name} (\S+)", text, re.MULTILINE)[1])  # type: ignore[index]


def test_a_chat_streams_in_and_is_what_the_api_answers(server: Server, page: Browser) -> None:
    _set(page, temperature="0", max_tokens="40", system="You are a painter.")
    _ask(page, QUESTION)
    partial = page.wait(lambda: (_answers(page) or [""])[0])
    assert not _is_done(page)
    page.wait(lambda: _is_done(page))
    messages = [{"role": "system", "content": "You are a painter."}, {"role": "user", "content": QUESTION}]
    first = _told(server, messages)
    assert _answers(page) == [first] and len(partial) < len(first) and first.startswith(partial)
    # In whole sentences for a screen reader, nothing left out.
    spoken = page.texts("#spoken p")
    assert "".join(spoken) == first and 1 <= len(spoken) < 10
    _ask(page, "And of the sea?")
    page.wait(lambda: len(_answers(page)) == 2 and _is_done(page))
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "And of the sea?"}]
    second = _told(server, messages)
    assert _answers(page) == [first, second]
    page.find("#again").click()
    page.wait(lambda: _is_done(page))
    assert _answers(page) == [first, second]
    page.find("#new-chat").click()
    assert _answers(page) == [] and page.texts("#conversation li") == []
    _ask(page, QUESTION)
    page.wait(lambda: _is_done(page))
    assert _answers(page) == [first]


def test_stop_cancels_in_the_engine(server: Server, page: Browser) -> None:
    _set(page, temperature="0", max_tokens="800")
    _ask(page, STORY)
    page.wait(lambda: (_answers(page) or [""])[0])
    assert _metric(server, "legato_running") == 1
    before = _metric(server, "legato_generated_tokens_total")
    page.find("#stop").click()
    page.wait(lambda: _metric(server, "legato_running") == 0)
    page.wait(lambda: _is_done(page))
    assert _metric(server, "legato_generated_tokens_total") - before < 400
    assert page.texts("#conversation .assistant .note")[0].startswith("stopped")
    (partial,) = _answers(page)
    assert partial and page.focused() == "prompt"


def test_settings_arrive_and_errors_are_told_as_the_server_says_them(page: Browser) -> None:
    _set(page, temperature="-1")
    _ask(page, QUESTION)
    error = page.wait(lambda: page.find("#error").text)
    assert error.startswith("temperature=-1.0 is not allowed") and _answers(page) == []
    page.find("[name=temperature]").clear()
    _set(page, temperature="1.5", top_p="0.9", top_k="40", seed="7", max_tokens="12")
    page.find("#again").click()
    page.wait(lambda: _is_done(page) and _answers(page))
    (first,) = _answers(page)
    assert page.find("#error").text == ""
    page.find("#again").click()
    page.wait(lambda: _is_done(page) and _answers(page))
    assert _answers(page) == [first]  # the seed's
    assert page.texts("#conversation .assistant .note")[0].startswith("cut")
    bad = [entry for entry in page.complaints() if "400 (Bad Request)" not in entry]  # Chromium notes every one
    assert bad == []


def test_a_wrong_key_is_told_and_a_right_one_taken(server: Server, page: Browser) -> None:
    page.driver.execute_script("sessionStorage.clear()")
    page.driver.get(server.url)
    page.wait(lambda: page.find("#connection").text == "the API key is missing or wrong")
    _ask(page, QUESTION)
    page.wait(lambda: page.find("#error").text == "the API key is missing or wrong")
    assert page.focused() == "key" and _answers(page) == []
    page.press("sk-wrong", Keys.TAB)
    page.wait(lambda: page.find("#connection").text == "the API key is missing or wrong")
    page.find("#key").clear()
    page.find("#key").send_keys(KEY, Keys.TAB)
    page.wait(lambda: page.find("#connection").text == "live")
    assert page.find("#model").text == "smollm2"
    _set(page, max_tokens="8")
    page.find("#again").click()
    page.wait(lambda: _is_done(page) and _answers(page))
    assert page.driver.execute_script("return [localStorage.length, document.cookie]") == [0, ""]
    bad = [entry for entry in page.complaints() if "401 (Unauthorized)" not in entry]
    assert bad == []


def test_markup_is_text(server: Server, page: Browser) -> None:
    prompt = "<img src=x onerror=alert(1)><b>Write</b> an HTML page with a heading and a script."
    _set(page, temperature="0", max_tokens="60")
    _ask(page, prompt)
    page.wait(lambda: _is_done(page) and _answers(page))
    answer = _told(server, [{"role": "user", "content": prompt}], 60)
    assert re.search(r"<\w+", answer)
    assert _answers(page) == [answer] and page.texts("#conversation .user .text") == [prompt]
    inside = "return document.querySelectorAll('#conversation .text *, #spoken p *').length"
    assert page.driver.execute_script(inside) == 0


def test_by_keyboard_alone(page: Browser) -> None:
    assert page.focused() == "prompt"
    page.press(STORY)
    page.press(Keys.ENTER, holding=Keys.SHIFT)
    page.press("Begin.", Keys.ENTER)
    page.wait(lambda: (_answers(page) or [""])[0])
    assert page.texts("#conversation .user .text") == [f"{STORY}\nBegin."]
    page.press(Keys.ESCAPE)
    page.wait(lambda: _is_done(page))
    assert page.texts("#conversation .assistant .note")[0].startswith("stopped") and page.focused() == "prompt"
    page.press(Keys.TAB)
    assert page.focused() == "again"
    assert page.driver.execute_script("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.press(Keys.ENTER)
    page.wait(lambda: not _is_done(page))
    page.press(Keys.ESCAPE)
    page.wait(lambda: _is_done(page))
    seen = []
    for _ in range(20):
        page.press(Keys.TAB)
        seen.append(page.focused() or page.driver.switch_to.active_element.text)
    for place in ("Settings", "new-chat", "scroll", "prompt", "again", "send", "The same as tables"):
        assert place in seen


def test_the_live_view_shows_a_request_and_then_none(server: Server, page: Browser) -> None:
    page.find("#tables summary").click()
    marker = "xylophone"
    page.wait(lambda: page.texts("#legend b") == ["0"] * 5)  # what the page before asked for may take a step to end
    body = {"model": "smollm2", "prompt": f"{marker} " * 40, "max_tokens": 90, "ignore_eos": True, "temperature": 0}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, headers=HEADERS, timeout=60)
        page.wait(lambda: page.texts("#legend .decode b") == ["1"])
        (row,) = page.wait(lambda: page.driver.execute_script(_ROWS))
        assert row[1] in ("prefill", "decode") and row[2].isdigit() and int(row[2]) >= 40
        usage = running.result().json()["usage"]
    page.wait(lambda: page.texts("#legend b") == ["0"] * 5 and not page.driver.execute_script(_ROWS))
    assert int(row[2]) == usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
    page.wait(lambda: page.texts("#tokens-rate") == ["0"] and re.search("[1-9]", page.texts("#first-token")[0]))
    page.wait(lambda: re.search(r"^The last \d{2,3} steps: .* at most 1 request at once", page.texts("#summary")[0]))
    page.wait(lambda: page.find("#cache-note").text.startswith("0% owned by requests, "))
    assert marker not in page.driver.execute_script("return document.body.innerText")
    drawn = page.driver.execute_script(_COLOURS)
    assert {"230,159,0", "86,180,233"} <= set(drawn)  # prefill and decode, as in a timeline's picture


_ROWS = "return [...document.querySelectorAll('#request-rows tr')].map(row => [...row.cells].map(c => c.textContent))"
_COLOURS = """
const canvas = document.getElementById("steps");
const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
const found = new Set();
for (let i = 0; i < data.length; i += 4) if (data[i + 3] === 255) found.add(data.slice(i, i + 3).join());
return [...found];
"""


def test_assistive_technology_is_told_all_by_name(page: Browser) -> None:
    page.find("#settings summary").click()
    page.find("#tables summary").click()
    told = page.wait(lambda: page.accessible())
    for role in ("textbox", "spinbutton", "button", "image", "table", "region", "heading"):
        names = [name for found, name in told if found == role]
        assert names and all(names), (role, names)
    expected = {
        ("textbox", "Message"), ("textbox", "System prompt"), ("textbox", "API key"), ("spinbutton", "Temperature"),
        ("spinbutton", "Top p"), ("spinbutton", "Top k"), ("spinbutton", "Max tokens"), ("spinbutton", "Seed"),
        ("button", "Send"), ("button", "Regenerate"), ("button", "New chat"), ("region", "Conversation"),
        ("region", "Chat"), ("region", "Engine"), ("table", "Requests now"), ("table", "Latest steps"),
        ("main", ""), ("banner", ""),
    }  # fmt: skip
    assert expected <= set(told)
    live = page.driver.execute_script(
        "return [...document.querySelectorAll('[aria-live],[role=alert],[role=status]')].map(e => e.id)"
    )
    assert live == ["error", "spoken", "connection"]  # neither the answer's tokens nor the figures are read out as such


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_narrow_screen_in_both_schemes(page: Browser, scheme: str) -> None:
    size = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = [{"name": "prefers-color-scheme", "value": scheme}, {"name": "prefers-reduced-motion", "value": "reduce"}]
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    try:
        page.find("#settings summary").click()
        page.find("#tables summary").click()
        assert page.driver.execute_script("return [document.documentElement.scrollWidth, innerWidth]") == [360, 360]
        background = page.driver.execute_script("return getComputedStyle(document.documentElement).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", background)[:3])) > 384) == (scheme == "light")
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_files_are_open_and_guarded_and_the_rest_needs_the_key(server: Server) -> None:
    for path in ("/", "/page/page.js", "/page/style.css", "/page/icon.svg"):
        response = httpx.get(server.url + path)
        assert response.status_code == 200 and response.headers["X-Content-Type-Options"] == "nosniff"
        policy = response.headers["Content-Security-Policy"].split("; ")
        assert policy[0] == "default-src 'self'" and "frame-ancestors 'none'" in policy
        again = httpx.get(server.url + path, headers={"If-None-Match": response.headers["ETag"]})
        assert again.status_code == (200 if path == "/" else 304)
    for path in ("/page/../v1/models", "/page/%2e%2e/app.py", "/page/..%2Fapp.py", "/page/none", "/page/"):
        assert httpx.get(f"{server.url}{path}", headers={}).status_code in (401, 404)
    assert httpx.get(f"{server.url}/engine/events").status_code == 401
    assert httpx.get(f"{server.url}/v1/models").status_code == 401


def _snapshots(response: httpx.Response) -> Iterator[dict[str, Any]]:
    return (json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line.startswith("data: "))


def test_watchers_see_the_same_steps_without_a_gap(server: Server) -> None:
    def watch() -> tuple[list[int], list[list[Any]]]:
        """Numbers of the steps as they came, and the steps, until the engine has run and is idle."""
        numbers: list[int] = []
        steps: list[list[Any]] = []
        with httpx.stream("GET", f"{server.url}/engine/events", headers=HEADERS, timeout=60) as response:
            for snapshot in _snapshots(response):
                steps += snapshot["steps"]
                first = snapshot["num_steps"] - len(snapshot["steps"])
                numbers += range(first, snapshot["num_steps"])
                if steps and not snapshot["running"] and not snapshot["requests"]:
                    return numbers, steps
        raise AssertionError("the stream ended")

    body = {"model": "smollm2", "prompt": ["The sky is"] * 3, "max_tokens": 60, "ignore_eos": True}
    with ThreadPoolExecutor(3) as pool:
        watching = [pool.submit(watch) for _ in range(2)]
        httpx.post(f"{server.url}/v1/completions", json=body, headers=HEADERS, timeout=60)
        (numbers, steps), (other_numbers, other_steps) = [one.result() for one in watching]
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    shared = min(len(numbers), len(other_numbers))
    assert numbers[-shared:] == other_numbers[-shared:] and steps[-shared:] == other_steps[-shared:]
    pictures = [column for column, *_ in steps]
    assert sum(column.lower().count("d") for column in pictures) == 3 * 59  # the first token is the prompt's
    assert pictures[-1] == "DDD" and sum(len(re.findall("[A-Z]", column)) for column in pictures) == 3
