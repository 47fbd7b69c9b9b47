"use strict";
// Reads the charts: the pointer or the arrow keys choose a reading, and its text is shown below.
// What there is to read was computed with the page; nothing is computed, fetched or stored here.

for (const figure of document.querySelectorAll("figure.chart")) {
  const svg = figure.querySelector("svg");
  const cursor = svg.querySelector(".cursor");
  const output = figure.querySelector("output");
  const readings = JSON.parse(figure.querySelector(".readings").textContent);

  const show = (index) => {
    const [x, heights, text] = readings[index];
    cursor.querySelectorAll("circle").forEach((dot) => dot.remove());
    const rule = cursor.querySelector("path");
    rule.setAttribute("transform", `translate(${x} 0)`);
    for (const y of heights) {
      const dot = document.createElementNS("http://www.w3.org/2000/svg", "circle");
      dot.setAttribute("cx", x);
      dot.setAttribute("cy", y);
      dot.setAttribute("r", 3.5);
      cursor.append(dot);
    }
    output.textContent = text;
    svg.setAttribute("aria-valuenow", index);
    svg.setAttribute("aria-valuetext", text);
  };

  const current = () => Number(svg.getAttribute("aria-valuenow"));

  const nearest = (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    let best = 0;
    readings.forEach((reading, index) => {
      if (Math.abs(reading[0] - x) < Math.abs(readings[best][0] - x)) best = index;
    });
    return best;
  };

  svg.addEventListener("pointermove", (event) => show(nearest(event)));
  svg.addEventListener("pointerdown", (event) => show(nearest(event)));
  svg.addEventListener("keydown", (event) => {
    const last = readings.length - 1;
    const steps = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -10, PageUp: 10, Home: -last, End: last };
    if (!(event.key in steps)) return;
    event.preventDefault();
    show(Math.min(last, Math.max(0, current() + steps[event.key])));
  });
  show(current());
}

for (const button of document.querySelectorAll("button[data-copy]")) {
  button.addEventListener("click", async () => {
    const text = document.getElementById(button.dataset.copy);
    const said = button.parentElement.querySelector(".copied");
    getSelection().selectAllChildren(text);
    try {
      await navigator.clipboard.writeText(text.textContent);
      said.textContent = "Copied.";
    } catch {
      said.textContent = document.execCommand("copy") ? "Copied." : "Selected: press Ctrl+C.";
    }
  });
}

// A folded section would be missing on paper.
addEventListener("beforeprint", () => {
  for (const section of document.querySelectorAll("details")) section.open = true;
});
