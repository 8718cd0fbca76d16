// Ties the charts to each other and to the tables: hovering or the arrow keys point at a site, a click or Enter goes to its row.
(() => {
  const HINT = "Point at a column, or press \u2190 and \u2192 in the picture; a click or Enter leads to its row in the table.";
  const columns = new Map(); // by module, in all charts
  for (const figure of document.querySelectorAll("figure[data-kind]")) tie(figure);
  document.addEventListener("point-at-site", (event) => light(moduleOf(event.detail.key, event.detail.kind)));

  function light(module) {
    for (const old of document.querySelectorAll(".hits .on, tr.on")) old.classList.remove("on");
    for (const rect of columns.get(module) ?? []) rect.classList.add("on");
  }

  async function tie(figure) {
    const kind = figure.dataset.kind;
    const [plot, readout] = [figure.querySelector(".plot"), figure.querySelector(".readout")];
    const rects = (await Promise.all([...plot.querySelectorAll(".hits")].map((group) => lay(group, kind)))).flat();
    if (rects.length === 0) return;
    let current = -1;
    readout.hidden = false;
    readout.textContent = HINT;

    const point = (rect) => {
      current = rects.indexOf(rect);
      light(moduleOf(rect.dataset.site, kind));
      document.getElementById(`site=${rect.dataset.site}`)?.classList.add("on");
      readout.textContent = rect.textContent.replace("\n", ": ");
    };
    const go = (rect) => {
      const hash = `#site=${encodeURIComponent(rect.dataset.site)}`;
      if (location.hash === hash) dispatchEvent(new HashChangeEvent("hashchange"));
      location.hash = hash;
    };
    plot.addEventListener("mouseover", (event) => { if (rects.includes(event.target)) point(event.target); });
    plot.addEventListener("click", (event) => { if (rects.includes(event.target)) go(event.target); });
    plot.addEventListener("keydown", (event) => {
      const to = { ArrowRight: current + 1, ArrowLeft: current - 1, Home: 0, End: rects.length - 1 }[event.key];
      if (event.key === "Enter" && current >= 0) go(rects[current]);
      if (to === undefined) return;
      event.preventDefault();
      const rect = rects[Math.min(Math.max(to, 0), rects.length - 1)];
      point(rect);
      rect.scrollIntoView({ block: "nearest", inline: "nearest" });
    });
  }

  // Lays a transparent rectangle with a title over each column of a panel.
  async function lay(group, kind) {
    const [x, y, width, height] = group.dataset.box.split(" ").map(Number);
    const found = await packed.read(group.dataset.columns);
    return found.map(([title, key = ""], number) => {
      const rect = group.appendChild(document.createElementNS(group.namespaceURI, "rect"));
      const step = width / found.length;
      for (const [name, value] of Object.entries({ x: x + number * step, y, width: step, height })) rect.setAttribute(name, value);
      rect.dataset.site = key;
      rect.appendChild(document.createElementNS(group.namespaceURI, "title")).textContent = title;
      const module = moduleOf(key, kind);
      columns.set(module, [...(columns.get(module) ?? []), rect]);
      return rect;
    });
  }
})();
