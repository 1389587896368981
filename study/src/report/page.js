// Values below the pointer, and series that a click on their name hides. Nothing is loaded, and a page without this is whole.
for (const plot of document.querySelectorAll("svg.plot")) {
  const series = [...plot.querySelectorAll("g.series[data-points]")].map((g) => ({
    number: g.dataset.series, name: g.dataset.name, points: JSON.parse(g.dataset.points), hidden: false,
  }));
  if (!series.length) continue;
  const values = document.createElement("div");
  values.className = "values";
  values.hidden = true;
  plot.after(values);
  for (const key of plot.querySelectorAll("g.key")) {
    const own = series.find((s) => s.number === key.dataset.series);
    if (!own) continue;
    const toggle = () => {
      own.hidden = !own.hidden;
      key.classList.toggle("off", own.hidden);
      key.setAttribute("aria-pressed", String(!own.hidden));
      for (const part of plot.querySelectorAll(`.series[data-series="${own.number}"], .band[data-series="${own.number}"]`)) {
        part.classList.toggle("off", own.hidden);
      }
    };
    key.classList.add("live");
    key.setAttribute("role", "button");
    key.setAttribute("tabindex", "0");
    key.setAttribute("aria-pressed", "true");
    key.setAttribute("aria-label", `show ${own.name}`);
    key.addEventListener("click", toggle);
    key.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      toggle();
    });
  }
  plot.addEventListener("pointermove", (event) => {
    const screen = plot.getScreenCTM();
    if (!screen) return;
    const x = new DOMPoint(event.clientX, event.clientY).matrixTransform(screen.inverse()).x;
    const shown = series.filter((s) => !s.hidden && s.points.length);
    const nearest = (s) => s.points.reduce((a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a));
    const lines = shown.map((s) => ({ name: s.name, point: nearest(s) }));
    values.replaceChildren(...lines.map(({ name, point }) => {
      const line = document.createElement("div");
      line.textContent = `${name}: ${point[2]} at ${point[1]}`;
      return line;
    }));
    values.hidden = !lines.length;
    const left = Math.min(event.clientX + 14, innerWidth - values.offsetWidth - 8);
    values.style.left = `${Math.max(left, 8)}px`;
    values.style.top = `${Math.min(event.clientY + 14, innerHeight - values.offsetHeight - 8)}px`;
  });
  plot.addEventListener("pointerleave", () => { values.hidden = true; });
}
