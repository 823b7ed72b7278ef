"""The pages in a real browser: a key, a model, a stream, a stop, the API tried out; and no request to anywhere else."""

import shutil
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest
from playwright.async_api import Page, async_playwright, expect

from tests.gateway.rig import ACME, Door, Rig, until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# A browser's own errands, which a closed network answers slowly.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
]
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is on the path: apt-get install chromium"),
]


@pytest.fixture
async def page(door: Door) -> AsyncIterator[Page]:
    """The page, opened; its requests and errors are looked at in the end."""
    asked: list[str] = []
    errors: list[str] = []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = await browser.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
        await page.goto(f"{door.url}/chat")
        yield page
        await browser.close()
    assert {urlsplit(url).netloc for url in asked} == {urlsplit(door.url).netloc}
    assert errors == []


async def enter(page: Page, key: str = ACME) -> None:
    await page.get_by_label("API key").fill(key)
    await page.get_by_role("button", name="Use it").click()
    await expect(page.get_by_role("status")).to_have_text("connected")


async def test_a_talk(door: Door, fleet: Rig, page: Page) -> None:
    await enter(page)
    assert fleet.model.name in await page.get_by_label("Model").locator("option").all_inner_texts()
    await page.get_by_label("Model").select_option(fleet.model.name)
    await page.get_by_label("at most").fill("30")
    await page.get_by_label("Message").fill("hello there")
    await page.get_by_label("Message").press("Enter")
    answer = page.locator("article.theirs").first
    await expect(answer.locator("footer")).to_contain_text("length")
    assert await answer.locator("p").text_content() == fleet.answer("hello there", 30)
    await expect(answer.locator("footer")).to_contain_text("base model · tier none · first token")
    await page.get_by_label("Message").fill("and again")
    await page.get_by_role("button", name="Send").click()
    await expect(page.locator("article.theirs").nth(1).locator("footer")).to_contain_text("length")


async def test_stop(door: Door, page: Page) -> None:
    await enter(page)
    await page.get_by_label("at most").fill("4000")
    await page.get_by_label("Message").fill("a long one")
    await page.get_by_role("button", name="Send").click()
    await expect(page.locator("article.theirs p").first).not_to_be_empty()
    await page.get_by_role("button", name="Stop").click()
    await expect(page.locator("article.theirs footer")).to_contain_text("stopped")
    await until(lambda: door.rows() == 0, 10, "no rows")
    await expect(page.get_by_role("button", name="Send")).to_be_enabled()


async def test_what_is_answered_is_text_and_never_markup(door: Door, page: Page) -> None:
    await enter(page)
    await page.get_by_label("at most").fill("2")
    await page.get_by_label("Message").fill("<img src=x onerror=alert(1)>")
    await page.get_by_role("button", name="Send").click()
    await expect(page.locator("article.mine p")).to_have_text("<img src=x onerror=alert(1)>")
    assert await page.locator("img").count() == 0


async def test_the_api_is_tried_out(door: Door, fleet: Rig, page: Page) -> None:
    await page.goto(f"{door.url}/docs")
    await expect(page.locator(".opblock")).to_have_count(6)
    await page.get_by_role("button", name="Authorize").click()
    await page.get_by_label("Value").fill(ACME)
    await page.locator(".auth-btn-wrapper").get_by_role("button", name="Apply credentials").click()
    await page.locator(".auth-btn-wrapper").get_by_role("button", name="Close").click()
    models = page.locator("#operations-models-list_models")
    await models.get_by_role("button").first.click()
    await models.get_by_role("button", name="Execute").click()
    await expect(models.locator(".live-responses-table .response-col_status").last).to_contain_text("200")
    await expect(models.locator(".live-responses-table .highlight-code").first).to_contain_text(fleet.model.name)
