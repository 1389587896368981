//! Prints what a specification means.

fn main() {
    let path = std::env::args().nth(1).unwrap();
    match dreamc_dsl::load(&path, &[]) {
        Ok((spec, warnings)) => {
            println!("{}", serde_json::to_string_pretty(&spec).unwrap());
            for w in warnings {
                print!("{}", w.render(&spec.sources, false));
            }
        }
        Err(d) => print!("{d}"),
    }
}
