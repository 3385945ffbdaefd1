"""The page at `/`: what a browser gets and is allowed to do with it. How it behaves is in tests/clients/page."""

import hashlib
import json
import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from urllib.parse import urljoin

import pytest

from harness.http_client import HttpClient
from paceline.server.page.routes import MEDIA_TYPES, PAGE, PAGE_PATHS, SERVICE_WORKER

KEY = "key-of-the-page's-test"
FOLDER = Path(str(files("paceline.server.page")))
WEB, VENDOR = FOLDER / "web", FOLDER / "vendor"
SCRIPTS = sorted(path.name for path in WEB.glob("*.js"))
MAX_SCRIPT_LINES = 300
ROW = re.compile(r"^\| ([\w@/-]+) \| (\d+\.\d+\.\d+) \| ([^|]+) \| `([\w.-]+)` \| `([\w.-]+)` \| `([0-9a-f]{64})` \|$", re.MULTILINE)
Served = Callable[..., HttpClient]


def content_of(path: str) -> bytes:
    place = path.removeprefix("/page/")
    return (WEB / (place if path != "/" else "index.html") if not place.startswith("vendor/") else FOLDER / place).read_bytes()


@pytest.fixture(scope="module")
def without_key(served: Served) -> HttpClient:
    """A client without the key of its server."""
    return served(api_keys=(KEY,))


@pytest.mark.parametrize("path", PAGE_PATHS)
def test_page_files_are_served_unchanged_without_api_key(without_key: HttpClient, path: str) -> None:
    answer = without_key.get(path)
    first_line = answer.content.split(b"\n")[0] + b"\n" if path == SERVICE_WORKER else b""
    assert (answer.status_code, answer.content) == (200, first_line + content_of(path))
    assert answer.headers["content-type"] == MEDIA_TYPES["html" if path == "/" else path.rpartition(".")[2]]
    head = without_key.ask("HEAD", path)
    assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", str(len(answer.content)))
    assert {**head.headers, "x-request-id": ""} == {**answer.headers, "x-request-id": ""}


def test_content_security_policy_limits_the_page_to_its_own_server(client: HttpClient) -> None:
    for path in PAGE_PATHS:
        headers = client.get(path).headers
        policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
        assert policy == {
            "default-src": "'none'",
            "script-src": "'self'",
            "style-src": "'self'",
            "img-src": "'self'",
            "connect-src": "'self'",
            "worker-src": "'self'",
            "manifest-src": "'self'",
            "base-uri": "'none'",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
            "require-trusted-types-for": "'script'",
            "trusted-types": "dompurify paceline-worker",
        }
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
        assert headers["cross-origin-opener-policy"] == headers["cross-origin-resource-policy"] == "same-origin"
    assert client.get("/health").headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"


def test_models_metrics_and_other_page_paths_need_an_api_key(without_key: HttpClient) -> None:
    for path in ("/v1/models", "/metrics", "/openapi.json", "/page", "/page/", "/page/index.html", "/page/vendor/README.md"):
        assert without_key.get(path).status_code == 401
    assert without_key.get("/v1/models", headers={"Authorization": f"Bearer {KEY}"}).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/page/index.html",
        "/page/routes.py",
        "/page/vendor/README.md",
        "/page/vendor/preact.LICENSE",
        "/page/../app.py",
        "/page/%2e%2e/app.py",
        "/page/vendor/..%2f..%2fapp.py",
        "/page//etc/passwd",
        "/page/APP.JS",
        "/index.html",
    ],
)
def test_paths_outside_the_page_files_are_status_404(client: HttpClient, path: str) -> None:
    answer = client.get(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


def test_page_files_are_refused_for_foreign_hosts_and_origins(client: HttpClient) -> None:
    for path in PAGE_PATHS:
        assert client.get(path, headers={"Host": "evil.example"}).status_code == 403
        assert "access-control-allow-origin" not in client.get(path, headers={"Origin": "http://evil.example"}).headers


def test_post_to_the_page_is_status_405(client: HttpClient) -> None:
    assert client.post("/", {}).status_code == 405


def test_page_file_lists_equal_the_web_folders() -> None:
    own = {"/" if path.name == "index.html" else f"/page/{path.name}" for path in WEB.iterdir()}
    assert sorted(PAGE_PATHS) == sorted(own | {f"/page/vendor/{path.name}" for path in VENDOR.glob("*js")})


def test_vendored_page_libraries_match_their_table_hashes_and_licences() -> None:
    table = (VENDOR / "README.md").read_text(encoding="utf-8")
    rows = ROW.findall(table)
    assert sorted(file for _, _, _, file, _, _ in rows) == sorted(path.name for path in VENDOR.glob("*js"))
    for name, version, licence, file, text, digest in rows:
        assert hashlib.sha256((VENDOR / file).read_bytes()).hexdigest() == digest, f"{name} {version} was changed"
        assert (VENDOR / text).stat().st_size > 500, licence
    named = set(re.findall(r"`([\w.-]+\.LICENSE)`", table))
    assert named == {path.name for path in VENDOR.glob("*.LICENSE")}


def test_index_html_has_no_inline_code_and_links_only_page_files() -> None:
    page = (WEB / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"<script[^>]*>", page) == ['<script type="module" src="page/app.js">']
    assert "<style" not in page
    assert re.search(r"\s(?:on\w+|style)=", page) is None
    assert {f"/{name}" for name in re.findall(r'(?:src|href)="([^"]+)"', page)} <= set(PAGE_PATHS)


def test_service_worker_caches_exactly_the_page_files(client: HttpClient) -> None:
    answer = client.get(SERVICE_WORKER)
    found = re.match(r'const FILES = (\[.*?\]), VERSION = "([0-9a-f]{16})";\n', answer.text)
    assert found
    kept = {urljoin(SERVICE_WORKER, file) for file in json.loads(found[1])}
    assert kept == set(PAGE_PATHS) - {SERVICE_WORKER}
    assert answer.headers["service-worker-allowed"] == "../"


def test_web_manifest_names_only_page_files(client: HttpClient) -> None:
    manifest = client.get("/page/manifest.webmanifest").json()
    assert {urljoin("/page/manifest.webmanifest", manifest[name]) for name in ("id", "start_url", "scope")} == {PAGE}
    assert {f"/page/{icon['src']}" for icon in manifest["icons"]} <= set(PAGE_PATHS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_page_scripts_are_short_import_page_files_and_build_no_html(name: str) -> None:
    text = (WEB / name).read_text(encoding="utf-8")
    imported = re.findall(r'^(?:import|export) .*?from "([^"]+)";$|^import "([^"]+)";$', text, re.MULTILINE)
    assert {f"/page/{first or second}".replace("/./", "/") for first, second in imported} <= set(PAGE_PATHS)
    assert len(imported) == len(re.findall(r"^(?:import|export \{)", text, re.MULTILINE))
    assert len(text.splitlines()) <= MAX_SCRIPT_LINES
    assert text.startswith("// "), "its first line says what it is"
    by_hand = r"innerHTML\s*=|insertAdjacentHTML|createElement|document\.write|\beval\(|new Function|setAttribute|\bstyle="
    assert re.search(by_hand, text) is None
    assert ("dangerouslySetInnerHTML" in text) == (name == "markdown.js")


def test_every_page_script_is_imported() -> None:
    texts = {name: (WEB / name).read_text(encoding="utf-8") for name in SCRIPTS}
    used = {found for text in texts.values() for found in re.findall(r'from "\./([\w.]+\.js)"', text)}
    assert used | {"app.js", "service_worker.js"} == set(SCRIPTS)
