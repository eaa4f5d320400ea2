"use strict";
(() => {
const root = document.documentElement;
const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
document.getElementById("theme").addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; });
const figure = v => Number(v).toPrecision(5).replace(/(\.\d*?)0+(e|$)/, "$1$2").replace(/\.(e|$)/, "$1");
const nearest = (steps, step) => {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) { const mid = (low + high) >> 1; if (steps[mid] < step) low = mid; else high = mid; }
  return step - steps[low] <= steps[high] - step ? low : high;
};
for (const chart of document.querySelectorAll(".chart")) {
  const data = JSON.parse(chart.querySelector("script").textContent), svg = chart.querySelector("svg");
  const cursor = document.createElementNS(svg.namespaceURI, "path"), tip = document.createElement("div");
  cursor.setAttribute("class", "cursor");
  svg.append(cursor);
  tip.className = "tip";
  tip.hidden = true;
  chart.append(tip);
  const hide = () => { tip.hidden = true; cursor.style.visibility = "hidden"; };
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), width = svg.viewBox.baseVal.width;
    const at = (event.clientX - box.left) / box.width * width;
    const part = (at - data.x[0]) / (data.x[1] - data.x[0]);
    if (part < -0.02 || part > 1.02) { hide(); return; }
    const wanted = data.steps[0] + part * (data.steps[1] - data.steps[0]);
    let shown = null;
    const rows = [];
    for (const line of data.lines) {
      if (line.step.length === 0) continue;
      const i = nearest(line.step, wanted);
      if (shown === null) shown = line.step[i];
      const range = line.low[i] < line.high[i] ? " (" + figure(line.low[i]) + " to " + figure(line.high[i]) + ")" : "";
      rows.push(line.name + ": " + figure(line.mean[i]) + range);
    }
    if (shown === null) { hide(); return; }
    const span = data.steps[1] - data.steps[0];
    const x = data.x[0] + (span > 0 ? (shown - data.steps[0]) / span : 0.5) * (data.x[1] - data.x[0]);
    cursor.setAttribute("d", "M" + x.toFixed(1) + "," + data.y[0] + "V" + data.y[1]);
    cursor.style.visibility = "visible";
    tip.textContent = "step " + Math.round(shown) + "\n" + rows.join("\n");
    tip.hidden = false;
    const place = box.left - chart.getBoundingClientRect().left + x / width * box.width;
    tip.style.left = (place > box.width / 2 ? place - tip.offsetWidth - 10 : place + 10) + "px";
    tip.style.top = "40px";
  });
}
})();
