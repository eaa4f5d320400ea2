# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium for tests, driven over its DevTools pipe: no package of Python, no port.

    with Browser(folder) as browser:
        page = browser.open(path)
        page.evaluate("document.title")

Page.problems has what the console, the log and the network said: errors, and every request but the page itself.
"""
import base64
import json
import os
import select
import shutil
import subprocess
import time

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find():
    """The program, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    def __init__(self, browser, session):
        self.browser, self.session, self.problems, self.url = browser, session, [], None

    def call(self, method, **parameters):
        return self.browser.call(method, self.session, **parameters)

    def take(self, event):
        method, parameters = event["method"], event["params"]
        if method == "Runtime.consoleAPICalled":
            self.problems.append(f"console: {parameters['args']}")
        elif method == "Runtime.exceptionThrown":
            self.problems.append(f"exception: {parameters['exceptionDetails']}")
        elif method == "Log.entryAdded":
            self.problems.append(f"log: {parameters['entry']['text']}")
        elif method == "Network.requestWillBeSent" and parameters["request"]["url"] != self.url:
            self.problems.append(f"request: {parameters['request']['url']}")

    def evaluate(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def move(self, x, y):
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def drag(self, begin, end):
        for kind, (x, y), held in (("mouseMoved", begin, 0), ("mousePressed", begin, 1), ("mouseMoved", end, 1), ("mouseReleased", end, 0)):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="none" if kind == "mouseMoved" and not held else "left",
                      buttons=held, clickCount=int(kind != "mouseMoved"))

    def key(self, name):
        """A key by its name in KeyboardEvent.key."""
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name)

    def set_dark(self, dark):
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def screenshot(self, path):
        image = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(image))


class Browser:
    """Ends the program and removes its profile at the end of a with statement."""

    def __init__(self, folder, seconds=120):
        self.folder, self.seconds, self.pages, self.number, self.rest = folder, seconds, {}, 0, b""

    def __enter__(self):
        to_read, self.to_browser = os.pipe()
        self.from_browser, to_write = os.pipe()
        # The program reads descriptor 3 and writes 4; the shell puts the pipes there, whatever their numbers are here.
        command = [find(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
                   "--window-size=1280,900", f"--user-data-dir={self.folder / 'profile'}", "--remote-debugging-pipe"]
        self.process = subprocess.Popen(["bash", "-c", f'exec "$@" 3<&{to_read} 4>&{to_write}', "bash", *map(str, command)],
                                        pass_fds=(to_read, to_write), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                        stderr=subprocess.DEVNULL)
        os.close(to_read)
        os.close(to_write)
        return self

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.to_browser)
        os.close(self.from_browser)
        shutil.rmtree(self.folder / "profile", ignore_errors=True)

    def message(self, deadline):
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.from_browser], [], [], max(0, deadline - time.monotonic()))
            data = os.read(self.from_browser, 1 << 16) if ready else b""
            if not data:
                raise TimeoutError("the browser has ended" if ready else f"the browser said nothing for {self.seconds} s")
            self.rest += data
        text, self.rest = self.rest.split(b"\0", 1)
        return json.loads(text)

    def step(self, deadline):
        """One message; an answer is returned, an event goes to its page."""
        message = self.message(deadline)
        if "id" in message:
            return message
        page = self.pages.get(message.get("sessionId"))
        if page:
            page.take(message)
        return None

    def call(self, method, session=None, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        text = json.dumps(message).encode() + b"\0"
        while text:
            text = text[os.write(self.to_browser, text):]
        deadline = time.monotonic() + self.seconds
        while True:
            answer = self.step(deadline)
            if answer and answer["id"] == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def blank(self):
        """An empty page, whose `problems` begin with what is done to it."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self.pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        return page

    def open(self, path):
        page = self.blank()
        page.url = path.resolve().as_uri()
        page.call("Page.navigate", url=page.url)
        deadline = time.monotonic() + self.seconds
        while not self.shows(page):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{page.url} is not loaded after {self.seconds} s")
            time.sleep(0.02)
        return page

    @staticmethod
    def shows(page):
        try:
            return page.evaluate("document.readyState + ' ' + location.href") == f"complete {page.url}"
        except RuntimeError: # the blank page before it has just gone
            return False
