// Copies a block of text: code to paste, the environment for a bug report.
(() => {
  for (const block of document.querySelectorAll(".copy")) copy(block.querySelector("button"), block.querySelector("pre"));

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
