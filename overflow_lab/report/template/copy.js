// Copies the block for a bug report.
(() => {
  copy(document.getElementById("copy"), document.getElementById("environment-text"));

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
