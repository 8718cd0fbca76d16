// Helpers of the other scripts. What is packed is gzipped JSON as base64: many rows in little room.
"use strict";
const packed = {
  async read(text) {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    return JSON.parse(await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text());
  },
};

// Of a layer "module/port", of an operation "precision/module/operation".
function moduleOf(key, kind) {
  return kind === "layer" ? key.slice(0, key.lastIndexOf("/")) : key.split("/")[1];
}

function button(content, action) {
  const made = document.createElement("button");
  made.type = "button";
  made.append(...content);
  made.addEventListener("click", action);
  return made;
}
