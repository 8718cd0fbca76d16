// Sorts, filters and searches the tables of sites, and follows links to a site (#site=KEY). The page reads the same without it.
(() => {
  const STEP = 300; // rows on the page at once; the others wait for a search, or for "more"
  const tables = [...document.querySelectorAll("table.sortable")].map(sortable);
  addEventListener("hashchange", follow);
  follow();

  function sortable(table) {
    const [body, section, kind] = [table.tBodies[0], table.closest("section"), table.dataset.kind];
    const heads = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
    const bar = heads.findIndex((head) => head.classList.contains("range"));
    const [model, barModel] = [body.rows[0].cloneNode(true), body.querySelector(".bar")?.cloneNode(true)];
    let rows = [...body.rows].map((tr) => {
      const texts = [...tr.cells].map((cell) => cell.textContent.trim());
      linked(tr);
      return { key: tr.id.slice(5), leaf: tr.classList.contains("leaf"), trouble: !!tr.querySelector(".bad, .near"), texts, tr };
    });
    let [limit, first] = [Math.max(STEP, rows.length), null];
    const tools = section.querySelector(".tools");
    const [filter, shown] = [tools.querySelector("[type=search]"), tools.querySelector("output")];
    const [leaf, trouble] = [tools.querySelector(".leaf-only"), tools.querySelector(".trouble-only")];
    const more = table.parentElement.appendChild(button("", () => { limit += STEP; update(); }));
    more.className = "more";
    tools.hidden = false;
    for (const control of [filter, leaf, trouble]) control?.addEventListener("input", () => { first = null; update(); });
    heads.forEach((head, column) => {
      if (column === bar) return; // the picture of a range has no value of its own
      head.append(button([...head.childNodes], () => sort(head, column)));
    });
    body.addEventListener("mouseover", point);
    body.addEventListener("focusin", point);
    const rest = section.querySelector("template.rest");
    if (rest) packed.read(rest.content.textContent).then((more) => { rows = rows.concat(more.map(read)); update(); follow(); }, () => {});
    update(); // a browser may restore what was typed before a reload

    function read([key, name, port, isLeaf, span, cells, tones]) {
      const [texts, left] = [[], [...cells]];
      heads.forEach((_, i) => texts.push(i === 1 ? `${name} ${port}`.trim() : i === bar ? "" : left.shift()));
      return { key, name, port, leaf: !!isLeaf, span, texts, tones, trouble: tones.trim() !== "" };
    }

    function element(row) {
      if (row.tr) return row.tr;
      const tr = row.tr = model.cloneNode(true);
      tr.id = `site=${row.key}`;
      tr.className = row.leaf ? "leaf" : "";
      [...tr.cells].forEach((cell, i) => {
        if (i === 1) return;
        cell.textContent = row.texts[i];
        cell.className = { b: "bad", n: "near" }[row.tones[i - tr.cells.length + row.tones.length]] || "";
      });
      tr.cells[1].replaceChildren(Object.assign(document.createElement("span"), { textContent: row.name }));
      linked(tr);
      if (row.port) tr.cells[1].append(" ", Object.assign(document.createElement("span"), { className: "port", textContent: row.port }));
      if (row.span && barModel) {
        const made = barModel.cloneNode();
        ["--x", "--w"].forEach((name, i) => made.style.setProperty(name, row.span[i]));
        tr.cells[bar].append(made);
      }
      return tr;
    }

    function update() {
      const wanted = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      const kept = rows.filter((row) => {
        row.words ??= row.texts.slice(0, 3).join(" ").toLowerCase();
        return wanted.every((word) => row.words.includes(word)) && (!leaf?.checked || row.leaf) && (!trouble.checked || row.trouble);
      });
      const page = kept.slice(0, limit);
      if (first && !page.includes(first)) page.splice(0, page.length, first, ...kept.slice(0, limit - 1));
      body.replaceChildren(...page.map(element));
      more.hidden = kept.length <= limit;
      more.textContent = `Show ${Math.min(STEP, kept.length - limit)} more rows`;
      const counted = page.length < kept.length ? `${page.length} shown of ` : "";
      shown.textContent = kept.length === rows.length && !counted ? "" : `${counted}${kept.length} of ${rows.length} rows`.replace(`${rows.length} of ${rows.length}`, rows.length);
    }

    function sort(head, column) {
      const descending = head.getAttribute("aria-sort") === "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const textual = !head.classList.contains("num") && head.textContent.trim() !== "#";
      const keys = new Map(rows.map((row) => [row, value(row.texts[column], textual)]));
      rows.sort((a, b) => compare(keys.get(a), keys.get(b), descending));
      first = null;
      update();
    }

    function point(event) {
      const key = event.target.closest("tr")?.id.slice(5);
      if (key) document.dispatchEvent(new CustomEvent("point-at-site", { detail: { key, kind } }));
    }

    const find = (test) => rows.find((row) => test(row.key));
    const go = (row) => {
      filter.value = "";
      for (const box of [leaf, trouble]) if (box) box.checked = false;
      first = row;
      update();
      for (const old of document.querySelectorAll("tr.target")) old.classList.remove("target");
      row.tr.classList.add("target");
      row.tr.tabIndex = -1;
      row.tr.focus({ preventScroll: true });
      row.tr.scrollIntoView({ block: "center" });
    };
    return { find, go };
  }

  // An operation's key without its ordinal, or a module's path alone, leads to the first row of it.
  function follow() {
    if (!location.hash.startsWith("#site=")) return;
    let key = location.hash.slice(6);
    try { key = decodeURIComponent(key); } catch { /* as it is */ }
    for (const test of [(k) => k === key, (k) => k.startsWith(`${key}/`)]) {
      for (const table of tables) {
        const row = table.find(test);
        if (row) return void table.go(row);
      }
    }
  }

  function linked(tr) {
    const link = document.createElement("a");
    link.className = "site";
    link.href = `#site=${encodeURIComponent(tr.id.slice(5))}`;
    const name = tr.cells[1].firstElementChild;
    link.title = name.title;
    name.textContent.split(/(?<=\w[._])(?=\w)/).forEach((part, i) => link.append(...(i ? [document.createElement("wbr"), part] : [part])));
    name.replaceWith(link);
  }

  function value(text, textual) {
    if (textual) return text;
    const plain = text.replace(/[,%<>]/g, "").replace("\u2212", "-").replace("\u221e", "Infinity");
    const value = plain === "\u2013" || plain === "" ? NaN : Number(plain);
    // "<0.1%" lies between 0 and 0.1, ">99.9%" between 99.9 and 100.
    return text.startsWith("<") ? value / 2 : text.startsWith(">") ? value + 0.05 : value;
  }

  function compare(a, b, descending) {
    if (typeof a === "string") return (descending ? -1 : 1) * a.localeCompare(b, "en", { numeric: true });
    if (Number.isNaN(a) || Number.isNaN(b)) return Number(Number.isNaN(a)) - Number(Number.isNaN(b)); // dashes last
    return a === b ? 0 : (descending ? -1 : 1) * (a < b ? -1 : 1);
  }
})();
