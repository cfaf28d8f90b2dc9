// Marks all records on the screen at once, and none after they were sent.

const all = document.getElementById("mark-all");

function marks() {
  return [...document.querySelectorAll("input.mark")];
}

if (all) {
  all.addEventListener("change", () => {
    for (const mark of marks()) mark.checked = all.checked;
  });
  document.addEventListener("change", (event) => {
    if (event.target.matches("input.mark")) all.checked = marks().every((mark) => mark.checked);
  });
  document.addEventListener("refresh", () => {
    all.checked = false;
    for (const mark of marks()) mark.checked = false;
  });
}
