// Sorts and filters the tables of layers and operations, and copies the environment block. The page reads the same without it.
"use strict";
(() => {
  for (const table of document.querySelectorAll("table.sortable")) sortable(table);
  copy(document.getElementById("copy"), document.getElementById("environment-text"));

  function sortable(table) {
    const body = table.tBodies[0];
    const rows = [...body.rows];
    const tools = table.closest("section").querySelector(".tools");
    const filter = tools.querySelector("[type=search]");
    const leaf = tools.querySelector(".leaf-only");
    const trouble = tools.querySelector(".trouble-only");
    const shown = tools.querySelector("output");
    tools.hidden = false;
    // What is searched: the cells of names, which come before the numbers.
    const words = new Map(rows.map((row) => [row, [...row.cells].slice(0, 3).map((cell) => cell.textContent).join(" ").toLowerCase()]));

    const update = () => {
      const wanted = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      let visible = 0;
      for (const row of rows) {
        const keep = wanted.every((word) => words.get(row).includes(word))
          && (!leaf?.checked || row.classList.contains("leaf"))
          && (!trouble.checked || row.querySelector(".bad, .near") !== null);
        row.hidden = !keep;
        visible += keep ? 1 : 0;
      }
      shown.textContent = visible === rows.length ? "" : `${visible} of ${rows.length} rows`;
    };
    for (const control of [filter, leaf, trouble]) control?.addEventListener("input", update);
    update(); // a browser may restore what was typed before a reload

    const heads = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
    heads.forEach((head, column) => {
      if (rows[0].cells[column].querySelector("svg")) return; // the picture of a range has no value of its own
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => sort(heads, head, column));
    });

    function sort(heads, head, column) {
      const descending = head.getAttribute("aria-sort") === "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const textual = !head.classList.contains("num") && head.textContent.trim() !== "#";
      const keys = new Map(rows.map((row) => [row, key(row.cells[column].textContent.trim(), textual)]));
      rows.sort((a, b) => compare(keys.get(a), keys.get(b), descending));
      body.append(...rows);
    }
  }

  function key(text, textual) {
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

  function copy(button, source) {
    if (!button || !source) return;
    button.hidden = false;
    button.addEventListener("click", async () => {
      const done = await write(source);
      button.textContent = done ? "Copied" : "Selected: press Ctrl+C";
      setTimeout(() => { button.textContent = "Copy"; }, 2500);
    });
  }

  async function write(source) {
    try {
      await navigator.clipboard.writeText(source.textContent);
      return true;
    } catch {
      getSelection().selectAllChildren(source); // file:// pages may have no clipboard
      return false;
    }
  }
})();
