"""`hypjax serve`: what it answers, what it refuses, and its page in a browser."""

import asyncio
import collections
import contextlib
import http.client
import io
import json
import pathlib
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

import hypjax
from hypjax.galleries.embeddings import open_gallery
from tests.helpers.texts import released, write_tokenizer

pytest.importorskip("uvicorn", reason="needs the serve extra")
pytest.importorskip("python_multipart", reason="needs the serve extra")
from hypjax.integrations.serve import limits  # noqa: E402
from hypjax.integrations.serve.app import create_server, listen  # noqa: E402
from hypjax.integrations.serve.batches import Batcher  # noqa: E402
from hypjax.integrations.serve.searcher import MOST_TOGETHER, Query, Searcher  # noqa: E402


@pytest.fixture(scope="module")
def model(untrained):
    return hypjax.load(untrained)


@pytest.fixture(scope="module")
def gallery(model, photos_folder, tmp_path_factory):
    """A gallery of 60 images of 10 classes, of which one cannot be read any more."""
    path = tmp_path_factory.mktemp("galleries")
    folder = shutil.copytree(photos_folder, path / "photos")
    model.gallery(folder).save(path / "gallery.npz")
    (folder / "class9" / "5.png").write_bytes(b"damaged")
    return open_gallery(path / "gallery.npz")


@contextlib.contextmanager
def serving(searcher):
    """Serves searches; yields the port."""
    running = create_server(searcher, ["photos.example"])
    listener = listen("127.0.0.1", 0)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        running.should_exit = True
        thread.join()
        listener.close()


@pytest.fixture(scope="module")
def port(model, gallery):
    """The port at which the gallery is served."""
    with serving(Searcher(model, gallery)) as port:
        yield port


def ask(port, method, path, body=None, **headers):
    """Sends a request; returns the status, and what the JSON of the answer says."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, named)
        answer = connection.getresponse()
        content = answer.read()
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        if answer.headers["content-type"] != "application/json":
            return answer.status, content
        return answer.status, json.loads(content)


def form(*contents):
    """A form with files, as curl and browsers send it."""
    head = b'--end\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n'
    body = b"".join(head + content + b"\r\n" for content in contents) + b"--end--\r\n"
    return body, {"content_type": "multipart/form-data; boundary=end"}


def test_an_upload_is_embedded_and_searched_as_the_file_is(port, model, gallery):
    path = gallery.ids[3]
    content = pathlib.Path(path).read_bytes()
    body, headers = form(content)
    for request in ((content, {}), (body, headers)):
        status, found = ask(port, "POST", "/embed", request[0], **request[1])
        assert status == 200 and found["space"] == str(model.space)
        np.testing.assert_allclose(found["vector"], gallery.vectors[3], atol=1e-6)
    status, found = ask(port, "POST", "/search?k=60", content)
    assert status == 200 and found["query"] == {} and found["hits"][0]["key"] == "3"
    keys, distances = ([hit[name] for hit in found["hits"]] for name in ("key", "distance"))
    exact = np.asarray(model.space.distance_matrix(gallery.vectors[3:4], gallery.vectors))[0]
    assert sorted(map(int, keys)) == [*range(60)] and distances == sorted(distances)
    np.testing.assert_allclose(distances, exact[np.int64(keys)], atol=1e-3)
    status, found = ask(port, "GET", "/search/3?k=7&places=true")
    (hits,) = model.search(gallery, path, k=7)
    assert [hit["class"] for hit in found["hits"]] == hits.labels
    folder = pathlib.Path(path).parents[1]
    assert [f"{folder}/{hit['name']}" for hit in found["hits"]] == hits.paths
    assert found["query"]["key"] == "3"
    places = np.array([image["place"] for image in (found["query"], *found["hits"])])
    assert (np.linalg.norm(places, axis=1) < 1).all()
    status, found = ask(port, "GET", "/search/7?class=class2&k=1000")
    assert [hit["class"] for hit in found["hits"]] == 6 * ["class2"]
    status, found = ask(port, "GET", "/thumbnail/7")
    assert status == 200 and Image.open(io.BytesIO(found)).size == Image.open(gallery.ids[7]).size


def test_views_are_embedded_as_their_files_one_or_several_a_call(model, gallery):
    searcher = Searcher(model, gallery)
    views = [searcher.view(pathlib.Path(path).read_bytes()) for path in gallery.ids[:7]]
    for searcher._most_embedded in (1, MOST_TOGETHER):
        np.testing.assert_allclose(searcher.embed(views), gallery.vectors[:7], atol=1e-6)


def test_items_that_wait_share_a_call_and_fail_alone():
    begun, released, calls = threading.Event(), threading.Event(), []

    def invert(items):
        calls.append(items)
        begun.set()
        released.wait(60)
        return [1 / item for item in items]

    async def ask_all():
        batcher = Batcher(invert, most=3)
        tasks = [asyncio.create_task(batcher(2))]
        await asyncio.to_thread(begun.wait, 60)  # A lone item is not delayed.
        tasks += [asyncio.create_task(batcher(item)) for item in (4, 0, 5, 8)]
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(batcher(9)))
        tasks[-1].cancel()  # Its client has gone.
        released.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    half, quarter, error, fifth, eighth, gone = asyncio.run(ask_all())
    assert (half, quarter, fifth, eighth) == (1 / 2, 1 / 4, 1 / 5, 1 / 8)
    assert isinstance(error, ZeroDivisionError) and isinstance(gone, asyncio.CancelledError)
    assert calls == [[2], [4, 0, 5], [4], [0], [5], [8]]


def test_items_without_a_result_fail_and_those_after_them_are_answered():
    async def ask_in_turn():
        batcher = Batcher(lambda items: [item for item in items if item], most=3)
        return [*await asyncio.gather(batcher(0), return_exceptions=True), await batcher(1)]

    error, one = asyncio.run(ask_in_turn())
    assert isinstance(error, ValueError) and one == 1


def test_searches_under_load_share_calls_and_none_is_lost_at_the_end(model, gallery, monkeypatch):
    """Each answer equals the answer to the request alone, though another request fails."""
    contents = [pathlib.Path(gallery.ids[i]).read_bytes() for i in range(20)] + [b"damaged"]
    paths = ["/search?k=5", "/search?k=5&places=true", "/search?k=3&class=class2"]
    requests = [(paths[i % 3], content) for i, content in enumerate(contents)]
    searcher, calls = Searcher(model, gallery), collections.defaultdict(list)
    with serving(searcher) as port:
        alone = [ask(port, "POST", *request) for request in requests]

    def observe(name, seconds):
        function = getattr(searcher, name)

        def observed(argument):
            calls[name].append(argument)
            time.sleep(seconds)  # As with a larger model.
            return function(argument)

        monkeypatch.setattr(searcher, name, observed)

    observe("view", 0)
    observe("embed", 0.2)
    observe("search", 0.2)
    with serving(searcher) as port, ThreadPoolExecutor(len(requests)) as pool:
        answers = [pool.submit(ask, port, "POST", *request) for request in requests]
        while len(calls["view"]) < len(requests):  # Until all have arrived; then the server ends.
            time.sleep(0.01)
    for answer, (status, expected) in zip(answers, alone, strict=True):
        found_status, found = answer.result()
        numbers = pop_numbers(found)
        assert numbers == pytest.approx(pop_numbers(expected), abs=1e-4)
        assert (found_status, found) == (status, expected)
    assert [status for status, _ in alone] == 20 * [200] + [415]
    assert len(calls["embed"]) < 10 and len(calls["search"]) < 10


def pop_numbers(answer):
    """Takes vectors and distances out of an answer: processors round them by the batch's size."""
    return [*answer.pop("vector", []), *(hit.pop("distance") for hit in answer.get("hits", []))]


def test_several_images_of_a_form_are_answered_in_order(port, gallery):
    contents = [pathlib.Path(gallery.ids[i]).read_bytes() for i in (7, 3, 7)]
    body, headers = form(contents[0], contents[1], b"damaged", contents[2])
    for path in "/embed", "/search?k=3":
        status, answers = ask(port, "POST", path, body, **headers)
        alone = [
            ask(port, "POST", path, content)[1]
            for content in (*contents[:2], b"damaged", contents[2])
        ]
        for answer, expected in zip(answers, alone, strict=True):
            assert pop_numbers(answer) == pytest.approx(pop_numbers(expected), abs=1e-4)
        assert status == 200 and answers == alone and "error" in answers[2]
    # Browsers also send a field in which no file was chosen: an empty file without a name.
    empty = form(b"")[0].replace(b"a.png", b"").removesuffix(b"--end--\r\n")
    status, answer = ask(port, "POST", "/embed", empty + form(contents[0])[0], **headers)
    assert status == 200 and answer == ask(port, "POST", "/embed", contents[0])[1]
    status, answer = ask(port, "POST", "/embed", *form(*33 * [b"x"])[:1], **headers)
    assert status == 400 and "32" in answer["error"]


def test_slow_uploads_do_not_stop_searches(port, gallery):
    slow = [http.client.HTTPConnection("127.0.0.1", port) for _ in range(17)]
    with contextlib.ExitStack() as stack:
        for connection in slow:
            stack.enter_context(contextlib.closing(connection))
            connection.putrequest("POST", "/search")
            connection.putheader("content-length", "1000")
            connection.endheaders(b"slow")
        assert ask(port, "GET", "/search/3?k=1")[0] == 200
        assert ask(port, "POST", "/search", pathlib.Path(gallery.ids[3]).read_bytes())[0] == 200


def test_hostile_requests_are_refused_in_one_sentence(port, gallery):
    image, large = pathlib.Path(gallery.ids[0]).read_bytes(), io.BytesIO()
    Image.new("1", (9_000, 9_000)).save(large, "PNG")
    for method, path, body, headers, expected, keyword in (
        ("POST", "/search", b"hello", {"content_type": "image/png"}, 415, "not an image"),
        ("POST", "/search", large.getvalue(), {}, 413, "pixels"),
        ("POST", "/search", b"", {"content_length": str(2**40)}, 413, "MiB"),
        ("POST", "/search", bytes(limits.MOST_BYTES * 3), {}, 413, "MiB"),
        ("POST", "/embed", (bytes(2**20) for _ in range(40)), {}, 413, "MiB"),
        ("POST", "/search?k=0", bytes(limits.MOST_BYTES), {}, 400, "k must be"),
        ("POST", "/gallery", bytes(limits.MOST_BYTES), {}, 405, "openapi.json"),
        ("GET", "/search/", None, {}, 404, "openapi.json"),
        ("POST", "/embed/", image, {}, 405, "openapi.json"),
        ("GET", "/search/7?k=0", None, {}, 400, "k must be"),
        ("GET", "/thumbnail/..%2f..%2fetc%2fpasswd", None, {}, 404, ""),
        ("GET", "/thumbnail/59", None, {}, 404, ""),  # It is damaged.
        ("POST", "/embed", image, {"host": "evil.example"}, 403, ""),
        ("POST", "/embed", image, {"origin": "https://evil.example"}, 403, ""),
    ):
        status, answer = ask(port, method, path, body, **headers)
        assert status == expected and keyword in answer["error"], (path, answer)
    proxied = {"host": "photos.example", "origin": "https://photos.example"}
    assert ask(port, "POST", "/embed", image, **proxied)[0] == 200


def test_the_page_searches_with_a_photograph_and_is_accessible(browser, port, gallery):
    sync_api = pytest.importorskip("playwright.sync_api")
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe")
    page, faults = browser.new_page(viewport={"width": 400, "height": 900}), []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(f"http://127.0.0.1:{port}/")
    page.wait_for_selector("#disk .dot")
    hits = page.locator("#hits a")
    sync_api.expect(hits).to_have_count(10)  # An image of each class, before the first search.
    page.set_input_files("#camera", gallery.ids[20])
    sync_api.expect(hits).to_have_count(12)
    assert hits.first.get_attribute("href") == "#20"
    assert hits.first.inner_text().startswith("1. 0.000")
    page.fill("#class", "class7")
    page.press("#class", "Enter")
    sync_api.expect(hits).to_have_count(6)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    rules = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}
    assert axe.Axe().run(page, options=rules).response["violations"] == faults == []


def test_words_are_searched_for(port, photos_folder, tmp_path, monkeypatch, browser):
    monkeypatch.setattr("hypjax.inference.released.read_language_image", lambda _: released())
    (tmp_path / "meru.pth").write_bytes(b"weights")
    model = hypjax.load(tmp_path / "meru.pth", tokenizer=write_tokenizer(tmp_path))
    gallery = model.gallery(photos_folder)
    status, found = ask(port, "GET", "/search?text=plum")
    assert status == 404 and "images alone" in found["error"]
    with serving(Searcher(model, gallery)) as port:
        assert ask(port, "GET", "/gallery")[1]["texts"]
        status, found = ask(port, "GET", "/search?text=a%20plum&k=5&places=true")
        (hits,) = model.search(gallery, text="a plum", k=5)
        assert status == 200 and [hit["class"] for hit in found["hits"]] == hits.labels
        assert np.linalg.norm(found["query"]["place"]) < 1
        for text in ("", "%20", "a" * 1001):
            status, found = ask(port, "GET", f"/search?text={text}")
            assert status == 400 and "1 to 1000 characters" in found["error"]
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{port}/")
        page.wait_for_selector("#disk .dot")
        page.fill("#text", "a plum")
        page.press("#text", "Enter")
        sync_api = pytest.importorskip("playwright.sync_api")
        sync_api.expect(page).to_have_title("Search: “a plum”")
        assert page.locator("#hits a").count() == 12
        assert hits.labels[0] in page.locator("#hits a").first.inner_text()


def test_words_search_a_gallery_of_texts(tmp_path, monkeypatch):
    monkeypatch.setattr("hypjax.inference.released.read_language_image", lambda _: released())
    (tmp_path / "meru.pth").touch()
    write_tokenizer(tmp_path)
    model = hypjax.load(tmp_path / "meru.pth")
    searcher = Searcher(model, model.embed_texts(["1/2 cup", "a plum"]))
    assert searcher.about["texts"] and searcher.about["sample"][0]["name"] == "1/2 cup"
    assert searcher.about["noun"] == "text"
    (point,) = model.embed_texts("1/2 cup").vectors
    ((hit, _),) = [x["hits"] for x in searcher.search([Query(point, None, 2, None, False)])]
    assert (hit["name"], hit["key"]) == ("1/2 cup", "0") and hit["distance"] < 1e-5
